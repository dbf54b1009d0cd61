"""Encoded keys, or values, of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.cache.tensors import grown
from kvsieve.core.codes import CodeFormat, Codes, decode, encode
from kvsieve.core.rotation import rotation
from kvsieve.core.shaping import encode_shaped

if TYPE_CHECKING:
    from kvsieve.planning.roles import Codec

# Smallest divisor of a channel, relative to the largest.
_LEAST_ROOT = 0.01

# Weight of isotropic queries, relative to the known ones' mean channel: future queries may differ from these few.
_MORE_ASKED = 1.0


class BlockPool:
    """Encoded keys or values of all blocks of a pool.

    Attributes:
        form: their format.
        dim: channels.
        codes: of `used` blocks, and spare room; None before the first.
        mean: float32 [R, D], subtracted from the channels of each KV row; None without centering.
        root: float32 [R, D], divisors of the channels of each KV row after that; None without balancing.
    """

    def __init__(self, form: CodeFormat, dim: int) -> None:
        self.form = form
        self.dim = dim
        self.codes: Codes | None = None
        self.mean: Tensor | None = None
        self.root: Tensor | None = None

    @property
    def turns(self) -> bool:
        """True if numbers are rotated, centered or balanced before encoding."""
        return self.form.rotated or self.mean is not None or self.root is not None

    def encode(
        self,
        codec: Codec,
        x: Tensor,
        rows: Tensor,
        begin: Tensor,
        fills: Mapping[int, Tensor] | None = None,
        asked: Tensor | None = None,
    ) -> Codes:
        """Encode blocks [N, T, D] of the KV rows int64 [N].

        begin: bool [R], KV rows without blocks. fills: blocks int64 by their number of real entries, which are the
        first ones; other entries do not affect their codes. None if all are real. asked: float32 [R, D, D], mean of q
        q^T over the queries to encode keys for; None for isotropic ones.
        """
        x = x.float()
        if self.form.centered:
            self.mean = self._measured(self.mean, _means(x, rows, len(begin), fills), begin)
            x = x - self.mean[rows][:, None]
        known = None if asked is None or not self.form.balanced else _known(asked)
        if self.form.balanced:
            root = _balance(_means(x.square(), rows, len(begin), fills), known)
            # Channels that hardly differ between tokens yet may do so later.
            root = root.clamp_min(_LEAST_ROOT * root.amax(1, keepdim=True))
            self.root = self._measured(self.root, torch.where(root > 0, root, torch.ones_like(root)), begin)
            x = x / self.root[rows][:, None]
        if self.form.rotated:
            x = x @ rotation(self.dim, x.device)
        if known is not None:
            return encode_shaped(self.form, x, codec.fit, self._metric(known), rows)
        if fills is None:
            return encode(self.form, x, codec.fit)
        # Filler counts in blocks with few real entries: every block has equally many outliers.
        least = -(-codec.block // 2)
        parts = [
            self.widened(encode(self.form, x[at, : max(n, least)], codec.fit), x.shape[1]) for n, at in fills.items()
        ]
        order = torch.cat(list(fills.values())).argsort()
        return Codes.joined(parts).apply(lambda part: part[order])

    def _metric(self, known: Tensor) -> Tensor:
        """Return the second moments [R, D, D] of queries in the space of encoded keys."""
        assert self.root is not None
        metric = known * self.root[:, :, None] * self.root[:, None]
        if self.form.rotated:
            turn = rotation(self.dim, metric.device)
            metric = turn.T @ metric @ turn
        return metric

    def widened(self, codes: Codes, tokens: int) -> Codes:
        """Return codes of blocks of `tokens` entries, the last ones empty."""
        if codes.packed.shape[1] == tokens:
            return codes
        by_token = self.form.axis == "token"
        scale, zero = (
            grown(part, 1, part.shape[1], tokens) if by_token and part is not None else part
            for part in (codes.scale, codes.zero)
        )
        assert scale is not None
        return Codes(grown(codes.packed, 1, codes.packed.shape[1], tokens), scale, zero, codes.places, codes.extra)

    @staticmethod
    def _measured(known: Tensor | None, fresh: Tensor, begin: Tensor) -> Tensor:
        """Return means or roots [R, D]: measured for KV rows that begin, known for the others."""
        return fresh if known is None else torch.where(begin[:, None], fresh, known)

    def decode(self, codes: Codes, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers [N, T, D] of blocks of the KV rows int64 [N]."""
        x = decode(self.form, codes, self.dim)
        if self.form.rotated:
            x = x @ rotation(self.dim, x.device).T
        if self.root is not None:
            x = x * self.root[rows][:, None]
        if self.mean is not None:
            x = x + self.mean[rows][:, None]
        return x.to(dtype)

    def blocks(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Return the numbers float32 [N, T, D] of blocks of the pool, which belong to KV rows int64 [N]."""
        assert self.codes is not None
        return self.decode(self.codes.apply(lambda part: part[numbers]), rows, torch.float32)

    def picked(self, block: Tensor, place: Tensor) -> Codes:
        """Return codes [N, 1, ...] of single entries, at places of the pool's blocks."""
        codes = self.codes
        assert codes is not None
        by_token = self.form.axis == "token"
        scale, zero = (
            None if part is None else (part[block, place][:, None] if by_token else part[block])
            for part in (codes.scale, codes.zero)
        )
        assert scale is not None
        out = Codes(codes.packed[block, place][:, None], scale, zero)
        if codes.places is not None and codes.extra is not None:
            where = codes.places[block].long() & 0xFFFF
            own = where // self.dim == place[:, None]
            out.places = (where % self.dim).to(torch.int16)
            out.extra = codes.extra[block] * own
        return out

    def tensors(self) -> Iterator[Tensor]:
        if self.codes is not None:
            yield from self.codes.tensors()
        yield from (part for part in (self.mean, self.root) if part is not None)


def _known(asked: Tensor) -> Tensor:
    """Return second moments [R, D, D] of queries, scaled to those of isotropic ones and regularized by them."""
    mean = asked.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    even = torch.eye(asked.shape[1], device=asked.device)
    return torch.where(mean > 0, asked / mean.clamp_min(torch.finfo(torch.float32).tiny), even) + _MORE_ASKED * even


def _balance(squares: Tensor, known: Tensor | None) -> Tensor:
    """Return divisors of the key channels [R, D], from mean squares of keys and queries.

    Rotated channels have equal errors. The error of a logit is then least if each key channel, divided, is as large as
    the query channel, multiplied.
    """
    return (squares if known is None else squares / known.diagonal(dim1=1, dim2=2)).pow(0.25)


def _means(x: Tensor, rows: Tensor, count: int, fills: Mapping[int, Tensor] | None) -> Tensor:
    """Return channel means [R, D] of blocks [N, T, D] of the KV rows int64 [N]; 0 for rows without blocks."""
    sums = x.new_zeros(count, x.shape[2])
    entries = x.new_zeros(count)
    whole = {x.shape[1]: torch.arange(len(x), device=x.device)}
    for fill, at in (whole if fills is None else fills).items():
        sums.index_add_(0, rows[at], x[at, :fill].sum(1))
        entries += fill * torch.bincount(rows[at], minlength=count)
    return sums / entries.clamp_min(1)[:, None]
