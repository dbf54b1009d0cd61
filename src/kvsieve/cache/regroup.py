"""Eviction of encoded entries of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.cache.body import Body
from kvsieve.core.codes import Codes


def keep_entries(body: Body, stays: Tensor) -> None:
    """Drop entries. Blocks that lose some are encoded again, once.

    Neighbours that fit in one block are merged, so that two neighbours are more than half full. Other blocks do not
    change. Freed blocks leave the pool.

    stays: bool [R, width], right-aligned like `padded`.
    """
    if not body.width:
        return
    body.widen(body.codec.block)
    device = body.table.device
    real = body.fills > 0
    # The block, among those of its KV row, of each entry.
    rows, slots = (torch.arange(body.width, device=device) >= body.width - body.counts[:, None]).nonzero(as_tuple=True)
    entries = slots - (body.width - body.counts)[rows]
    places = torch.arange(body.table.shape[1], device=device).expand_as(body.fills)
    at = places.flatten().repeat_interleave(body.fills.flatten())
    kept = stays[rows, slots]
    left = torch.zeros_like(body.fills)
    left.index_put_((rows, at), kept.long(), accumulate=True)
    if bool(kept.all()):
        return
    *lists, most = _joined(left.tolist(), body.codec.block)
    merged, joined = (torch.tensor(part, device=device).view_as(left) for part in lists)
    untouched = real & (left == body.fills) & (joined == 0)
    fresh = Body(body.codec, len(body.table), (body.keys.dim, body.values.dim), body.dtype, device)
    for part, old in ((fresh.keys, body.keys), (fresh.values, body.values)):
        part.mean = old.mean
        part.root = old.root
    fresh.table = body.table.new_zeros(len(body.table), most)
    fresh.fills = torch.zeros_like(fresh.table)
    same_row, same_place = untouched.nonzero(as_tuple=True)
    moved = body.table[same_row, same_place]
    parts = [
        [part.codes.apply(lambda part: part[moved]) for part in (body.keys, body.values)]  # type: ignore[union-attr]
    ]
    assert body.index is not None
    indices = [body.index[moved]]
    to = merged[same_row, same_place]
    fresh.table[same_row, to] = torch.arange(len(moved), device=device)
    fresh.fills[same_row, to] = body.fills[same_row, same_place]
    again = kept & ~untouched[rows, at]
    rows, entries, at = rows[again], entries[again], merged[rows[again], at[again]]
    if len(rows):
        _encode_again(body, fresh, parts, indices, rows, entries, at, len(moved))
    fresh.keys.codes, fresh.values.codes = (Codes.joined([pair[i] for pair in parts]) for i in (0, 1))
    fresh.index, fresh.used = torch.cat(indices), sum(map(len, indices))
    fresh.note_counts()
    vars(body).update(vars(fresh))


def _encode_again(
    body: Body,
    fresh: Body,
    parts: list[list[Codes]],
    indices: list[Tensor],
    rows: Tensor,
    entries: Tensor,
    at: Tensor,
    first: int,
) -> None:
    """Encode single entries in their new blocks, starting at block number `first`."""
    known, which = torch.unique(torch.stack([rows, at]), dim=1, return_inverse=True)
    fills = torch.bincount(which, minlength=known.shape[1])
    # Entries of a block follow each other; filler repeats its last one.
    start = fills.cumsum(0) - fills
    take = start[:, None] + torch.arange(body.codec.block, device=rows.device)
    take = torch.minimum(take, (start + fills - 1)[:, None])
    order = which.argsort(stable=True)
    rows = rows[order]
    entries = entries[order]
    pair = []
    for what in ("keys", "values"):
        numbers = body.read(what, rows, entries)[take]
        none_begins = torch.zeros_like(body.counts, dtype=torch.bool)
        pair.append(fresh.part(what).encode(body.codec, numbers, known[0], none_begins))
    parts.append(pair)
    indices.append(body.read_index(rows, entries)[take])
    fresh.table[known[0], known[1]] = first + torch.arange(len(fills), device=rows.device)
    fresh.fills[known[0], known[1]] = fills


def _joined(fills: list[list[int]], block: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Merge neighbours that fit in one block, by the remaining entries of each KV row's blocks.

    Returns:
        The new block of each old one; 1 if it is merged with others, else 0; the most new blocks of a KV row.
    """
    numbers = []
    several = []
    most = 0
    for row in fills:
        sizes: list[int] = []
        parts: list[int] = []
        at = []
        for fill in row:
            if sizes and sizes[-1] + fill <= block:
                sizes[-1] += fill
                parts[-1] += bool(fill)
            elif fill:
                sizes.append(fill)
                parts.append(1)
            at.append(max(len(sizes) - 1, 0))
        numbers.append(at)
        several.append([int(bool(sizes) and parts[number] > 1) for number in at])
        most = max(most, len(sizes))
    return numbers, several, most
