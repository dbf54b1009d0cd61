"""Encoded entries of one layer: blocks in a pool, with a block list per KV row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from kvsieve.cache.pool import BlockPool
from kvsieve.cache.tensors import grown
from kvsieve.core.codes import Codes

if TYPE_CHECKING:
    from kvsieve.planning.roles import Codec


class Body:
    """Encoded entries of R KV rows, each a list of blocks of up to T entries.

    KV row b * H + h is KV head h of batch row b. Its entries are those of its blocks, in order, all of them real.

    Attributes:
        codec: encodes them.
        dtype: of decoded entries.
        keys: encoded keys.
        values: encoded values.
        index: int32 [P, T], token index of each entry of the pool.
        used: blocks of the pool in use; the remaining ones are spare, and are written in place.
        table: int64 [R, M], blocks of each KV row; 0 after its last one. Replaced, never written in place.
        fills: int64 [R, M], entries of each of these blocks: T unless some were evicted; 0 after the last one.
    """

    def __init__(self, codec: Codec, rows: int, dims: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self.codec = codec
        self.dtype = dtype
        self.keys, self.values = BlockPool(codec.keys(dims[0]), dims[0]), BlockPool(codec.values(dims[1]), dims[1])
        self.index: Tensor | None = None
        self.used = 0
        self.table = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self.fills = self.table
        self.note_counts()

    def note_counts(self) -> None:
        """Recount entries after a change of table and fills."""
        self.counts = self.fills.sum(1)
        known = self.counts.tolist()
        self.width = max(known, default=0)
        self.is_even = len(set(known)) <= 1
        # Without holes a division gives an entry's block.
        self.is_full = bool((self.fills == self.tokens).all() if self.is_even else False)

    @property
    def tokens(self) -> int:
        """T, entries per block."""
        return self.codec.block if self.index is None else self.index.shape[1]

    def add(
        self,
        keys: Tensor,
        values: Tensor,
        index: Tensor,
        rows: Tensor,
        fills: Tensor | None = None,
        asked: Tensor | None = None,
    ) -> None:
        """Encode blocks and append each to its KV row.

        Args:
            keys: [N, T, D].
            values: [N, T, Dv].
            index: int32 [N, T].
            rows: int64 [N], ascending: the KV row of each block.
            fills: int64 [N], entries of each, the first ones. None: T.
            asked: as in `BlockPool.encode`.
        """
        count = len(self.table)
        blocks = (self.fills > 0).sum(1)
        some = None
        if fills is not None:
            some = {fill: (fills == fill).nonzero()[:, 0] for fill in sorted(set(fills.tolist()))}
        encoded = [
            self.keys.encode(self.codec, keys, rows, blocks == 0, some, asked),
            self.values.encode(self.codec, values, rows, blocks == 0, some),
        ]
        first = self._put(encoded, index)
        added = torch.bincount(rows, minlength=count)
        # After rows were removed there may be more places than blocks.
        wide = max(self.table.shape[1], int((blocks + added).max()))
        table, filled = (part.new_zeros(count, wide) for part in (self.table, self.fills))
        table[:, : self.table.shape[1]], filled[:, : self.fills.shape[1]] = self.table, self.fills
        number = torch.arange(len(rows), device=rows.device)
        place = blocks[rows] + number - (added.cumsum(0) - added)[rows]
        table[rows, place] = number + first
        filled[rows, place] = index.shape[1] if fills is None else fills
        self.table = table
        self.fills = filled
        self.note_counts()

    def _put(self, encoded: list[Codes], index: Tensor) -> int:
        """Put blocks in the pool, growing its buffers by at least 1/32; return the number of the first."""
        first = self.used
        new = len(index)
        self.used = first + new
        if self.index is None:
            self.keys.codes, self.values.codes, self.index = encoded[0], encoded[1], index.contiguous()
            return first
        self.widen(index.shape[1])
        encoded = [
            part.widened(codes, self.tokens) for part, codes in zip((self.keys, self.values), encoded, strict=True)
        ]
        index = index if index.shape[1] == self.tokens else grown(index, 1, index.shape[1], self.tokens)
        if self.used > len(self.index):
            capacity = first + max(new, len(self.index) // 32)
            self.apply(lambda part: grown(part, 0, first, capacity))
        for part, fresh in ((self.keys, encoded[0]), (self.values, encoded[1])):
            assert part.codes is not None
            for to, new_part in zip(part.codes.tensors(), fresh.tensors(), strict=True):
                to[first : self.used] = new_part
        self.index[first : self.used] = index
        return first

    def make_room(self, tokens: int) -> None:
        """Reserve blocks for `tokens` more entries of each KV row, if there are blocks."""
        if self.index is None:
            return
        self.widen(self.codec.block)
        most = self.used + len(self.table) * -(-tokens // self.codec.block)
        if most > len(self.index):
            self.apply(lambda part: grown(part, 0, self.used, most))

    def widen(self, tokens: int) -> None:
        """Make room for at least `tokens` entries per block, without encoding again."""
        if self.index is None or tokens <= self.tokens:
            return
        for part in (self.keys, self.values):
            assert part.codes is not None
            part.codes = part.widened(part.codes, tokens)
        self.index = grown(self.index, 1, self.tokens, tokens)
        # Blocks that were full are not any more.
        self.is_full = False

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to all buffers of the pool."""
        for part in (self.keys, self.values):
            assert part.codes is not None
            part.codes = part.codes.apply(change)
        assert self.index is not None
        self.index = change(self.index)

    def part(self, what: str) -> BlockPool:
        """Return the encoded "keys" or "values"."""
        return self.keys if what == "keys" else self.values

    def find(self, rows: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return block and place in it of entries int64 [N] of KV rows int64 [N]."""
        if self.is_full:
            at = entries // self.tokens
            return self.table[rows, at], entries - at * self.tokens
        # Offsets in all KV rows' entries, concatenated.
        fills = self.fills.flatten()
        ends = fills.cumsum(0)
        number = entries + (self.counts.cumsum(0) - self.counts)[rows]
        at = torch.searchsorted(ends, number, right=True)
        return self.table.flatten()[at], number - (ends - fills)[at]

    def read(self, what: str, rows: Tensor, entries: Tensor) -> Tensor:
        """Return the decoded numbers [N, D] of single entries; what: "keys" or "values"."""
        part = self.part(what)
        assert part.codes is not None
        block, place = self.find(rows, entries)
        return part.decode(part.picked(block, place), rows, self.dtype)[:, 0]

    def read_index(self, rows: Tensor, entries: Tensor) -> Tensor:
        """Return the token index int32 [N] of single entries."""
        assert self.index is not None
        return self.index[self.find(rows, entries)]

    def padded(self, what: str) -> Tensor:
        """Decode all "keys" or "values": [R, width, D], each KV row's entries right-aligned."""
        part = self.part(what)
        assert part.codes is not None
        blocks = self.table.flatten()
        rows = torch.arange(len(self.table), device=blocks.device).repeat_interleave(self.table.shape[1])
        return self._aligned(part.blocks(blocks, rows).to(self.dtype))

    def padded_index(self) -> Tensor:
        """Return token indices int32 [R, width] of the same entries; -1 for filler."""
        assert self.index is not None
        found = self._aligned(self.index[self.table.flatten()])
        real = self.real()
        return found if real is None else found.masked_fill(~real, -1)

    def real(self) -> Tensor | None:
        """Return bool [R, width], True for real entries; None without filler."""
        if self.is_even:
            return None
        return torch.arange(self.width, device=self.counts.device) >= self.width - self.counts[:, None]

    def _aligned(self, blocks: Tensor) -> Tensor:
        """Turn [R * M, T, ...] into [R, width, ...]."""
        count = len(self.table)
        joined = blocks.view(count, -1, *blocks.shape[2:])
        if self.is_full:
            return joined
        # Places of real entries, in order, at the right end.
        there = (torch.arange(self.tokens, device=blocks.device) < self.fills[..., None]).flatten(1)
        places = there.to(torch.uint8).argsort(dim=1, stable=True)[:, there.shape[1] - self.width :]
        if joined.ndim == 3:
            places = places[..., None].expand(-1, -1, joined.shape[2])
        return joined.gather(1, places)

    def reorder(self, rows: Tensor) -> None:
        """Make KV row i a copy of KV row ``rows[i]``, sharing blocks. Unused blocks are freed later."""
        self.table = self.table[rows]
        self.fills = self.fills[rows]
        alive = torch.unique(self.table[self.fills > 0])
        if self.index is not None and len(alive) <= self.used // 2:
            self.apply(lambda part: part[alive])
            self.table = torch.searchsorted(alive, self.table) * (self.fills > 0)
            self.used = len(alive)
        for part in (self.keys, self.values):
            part.mean, part.root = (None if moments is None else moments[rows] for moments in (part.mean, part.root))
        self.note_counts()

    def copied(self, *, share: bool) -> Self:
        """Return a copy; with `share` on the same pool, to which only one of the two may add."""
        other = copy.copy(self)
        other.keys, other.values = copy.copy(self.keys), copy.copy(self.values)
        if not share and self.index is not None:
            other.apply(Tensor.clone)
        return other

    def used_bytes(self) -> int:
        """Bytes of encoded keys and values, without spare room."""
        if self.index is None or not self.used:
            return 0
        pools = [part.codes for part in (self.keys, self.values) if part.codes is not None]
        return sum(tensor.nbytes for codes in pools for tensor in codes.tensors()) * self.used // len(self.index)

    def parts(self) -> dict[str, Any]:
        """Return the encoded entries, with the used blocks of the pool."""
        parts: dict[str, Any] = {"table": self.table, "fills": self.fills}
        if self.index is None:
            return parts
        parts["index"] = self.index[: self.used]
        for what in ("keys", "values"):
            part = self.part(what)
            assert part.codes is not None
            codes = part.codes.apply(lambda buffer: buffer[: self.used])
            parts[what] = {"mean": part.mean, "root": part.root, **vars(codes)}
        return parts

    def fill(self, parts: dict[str, Any]) -> None:
        """Restore the output of `parts` into an empty body."""
        if "index" in parts:
            self.index = parts["index"]
            self.used = len(parts["index"])
            for what in ("keys", "values"):
                part = self.part(what)
                stored = dict(parts[what])
                part.mean, part.root = stored.pop("mean"), stored.pop("root")
                part.codes = Codes(**stored)
        self.table = parts["table"]
        self.fills = parts["fills"]
        self.note_counts()

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from self.keys.tensors()
        yield from self.values.tensors()
        yield from (self.table, self.fills, self.counts)
        if self.index is not None:
            yield self.index
