"""Encoded keys, or values, of one layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.core.codes import CodeFormat, Codes, decode, encode, rotation

if TYPE_CHECKING:
    from kvsieve.roles import Codec


class BlockPool:
    """Encoded keys, or values, of all blocks of a pool.

    Attributes:
        form: their format.
        dim: channels.
        codes: of `used` blocks, and room for more; None before the first.
        mean: float32 [R, D], what was taken off the channels of each KV row; None where nothing was.
    """

    def __init__(self, form: CodeFormat, dim: int) -> None:
        self.form, self.dim = form, dim
        self.codes: Codes | None = None
        self.mean: Tensor | None = None

    @property
    def turns(self) -> bool:
        """True where numbers are rotated, or their mean is taken off, before they are encoded."""
        return self.form.rotated or self.mean is not None

    def encode(self, codec: Codec, x: Tensor, rows: Tensor, count: int) -> Codes:
        """Encode blocks [N, T, D] of the KV rows int64 [N], of `count` in all."""
        x = x.float()
        if self.form.centered:
            if self.mean is None:
                sums = x.new_zeros(count, self.dim).index_add_(0, rows, x.mean(1))
                self.mean = sums / torch.bincount(rows, minlength=count).clamp_min(1)[:, None]
            x = x - self.mean[rows][:, None]
        if self.form.rotated:
            x = x @ rotation(self.dim, x.device)
        return encode(self.form, x, codec.fit)

    def decode(self, codes: Codes, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers [N, T, D] of blocks of the KV rows int64 [N]."""
        x = decode(self.form, codes, self.dim)
        if self.form.rotated:
            x = x @ rotation(self.dim, x.device).T
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
            out.places, out.extra = (where % self.dim).to(torch.int16), codes.extra[block] * mine
        return out

    def tensors(self) -> Iterator[Tensor]:
        if self.codes is not None:
            yield from self.codes.tensors()
        if self.mean is not None:
            yield self.mean
