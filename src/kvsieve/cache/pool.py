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

# Of what channels are divided by, the least part of the most.
_LEAST_ROOT = 0.01

# What even queries add, as a part of the known ones' mean channel: those to come may ask for others than these few.
_MORE_ASKED = 1.0


class BlockPool:
    """Encoded keys, or values, of all blocks of a pool.

    Attributes:
        form: their format.
        dim: channels.
        codes: of `used` blocks, and room for more; None before the first.
        mean: float32 [R, D], what was taken off the channels of each KV row; None where nothing was.
        root: float32 [R, D], what the channels of each KV row were then divided by; None where by nothing.
    """

    def __init__(self, form: CodeFormat, dim: int) -> None:
        self.form = form
        self.dim = dim
        self.codes: Codes | None = None
        self.mean: Tensor | None = None
        self.root: Tensor | None = None

    @property
    def turns(self) -> bool:
        """True where numbers are rotated, centered or balanced before they are encoded."""
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

        begin: bool [R], KV rows that have no blocks yet. fills: by how many of a block's entries are real, the first
        ones, the blocks int64 of so many; what others there are has no part in their codes. None where all are.
        asked: float32 [R, D, D], mean of q q^T over the queries that keys are encoded for; None for even ones.
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
        # Of blocks with few real entries, others count as well: numbers kept apart are as many in every block.
        least = -(-codec.block // 2)
        made = [
            self.widened(encode(self.form, x[at, : max(n, least)], codec.fit), x.shape[1]) for n, at in fills.items()
        ]
        order = torch.cat(list(fills.values())).argsort()
        return Codes.joined(made).apply(lambda each: each[order])

    def _metric(self, known: Tensor) -> Tensor:
        """Second moments [R, D, D] of queries as encoded keys are matched with them."""
        assert self.root is not None
        made = known * self.root[:, :, None] * self.root[:, None]
        if self.form.rotated:
            turn = rotation(self.dim, made.device)
            made = turn.T @ made @ turn
        return made

    def widened(self, codes: Codes, tokens: int) -> Codes:
        """Codes of blocks of `tokens` entries, the last ones of which are none yet."""
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
        """Means or roots [R, D]: those of KV rows that begin are measured now, the others' stay."""
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
        return self.decode(self.codes.apply(lambda each: each[numbers]), rows, torch.float32)

    def picked(self, block: Tensor, place: Tensor) -> Codes:
        """Codes [N, 1, ...] of one entry each, at a place of a block of the pool."""
        codes = self.codes
        assert codes is not None
        by_token = self.form.axis == "token"
        scale, zero = (
            None if each is None else (each[block, place][:, None] if by_token else each[block])
            for each in (codes.scale, codes.zero)
        )
        assert scale is not None
        out = Codes(codes.packed[block, place][:, None], scale, zero)
        if codes.places is not None and codes.extra is not None:
            where = codes.places[block].long() & 0xFFFF
            mine = where // self.dim == place[:, None]
            out.places = (where % self.dim).to(torch.int16)
            out.extra = codes.extra[block] * mine
        return out

    def tensors(self) -> Iterator[Tensor]:
        if self.codes is not None:
            yield from self.codes.tensors()
        yield from (part for part in (self.mean, self.root) if part is not None)


def _known(asked: Tensor) -> Tensor:
    """Second moments [R, D, D] of queries, made as large as those of even ones, and some of these added."""
    mean = asked.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    even = torch.eye(asked.shape[1], device=asked.device)
    return torch.where(mean > 0, asked / mean.clamp_min(torch.finfo(torch.float32).tiny), even) + _MORE_ASKED * even


def _balance(squares: Tensor, known: Tensor | None) -> Tensor:
    """Divisors of the channels [R, D] of keys, of their mean squares and those of queries.

    Once they are turned, all channels miss by as much. What a logit misses by then is least where each channel of the
    keys, divided, is as large as that of the queries, multiplied.
    """
    return (squares if known is None else squares / known.diagonal(dim1=1, dim2=2)).pow(0.25)


def _means(x: Tensor, rows: Tensor, count: int, fills: Mapping[int, Tensor] | None) -> Tensor:
    """Mean of each channel of KV rows: [R, D] of blocks [N, T, D] of the KV rows int64 [N]; 0 where there is none."""
    sums = x.new_zeros(count, x.shape[2])
    entries = x.new_zeros(count)
    whole = {x.shape[1]: torch.arange(len(x), device=x.device)}
    for fill, at in (whole if fills is None else fills).items():
        sums.index_add_(0, rows[at], x[at, :fill].sum(1))
        entries += fill * torch.bincount(rows[at], minlength=count)
    return sums / entries.clamp_min(1)[:, None]
