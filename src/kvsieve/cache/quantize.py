"""Encoding of entries that are no longer among the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.cache.contract import MIN_ROOM, LayerMemory

if TYPE_CHECKING:
    from kvsieve.cache.packed_parts import PackedParts
    from kvsieve.planning.roles import Codec


def quantize_tail(store: PackedParts, codec: Codec, *, ends_prompt: bool) -> None:
    """Encode the oldest exact entries of each KV head, keeping enough of the newest.

    ends_prompt: blocks need not be full, so that little more than the newest stays exact; they are filled evenly.
    """
    body = store.bodies[-1]
    exact = store.exact
    sinks = 0 if body.width or store.first else codec.sinks
    room = exact.size - store.first - sinks
    if not ends_prompt and (room <= codec.block or exact.size < store.due):
        return
    if exact.valid is None and body.is_even:
        left = room - codec.newest(max(store.lengths))
        count = int(_encodable(torch.tensor([left]), codec, ends_prompt, torch.tensor([not body.width])))
        if count > 0:
            _encode_alike(store, count, sinks, ends_prompt)
        else:
            store.due = exact.size + codec.block - left
    else:
        _encode_rows(store, sinks, ends_prompt)


def blocks_of(
    store: LayerMemory, slots: Tensor, counts: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Divide slots of a store into blocks for `Body.add`, filled as evenly as possible per KV row.

    Args:
        store: of the entries.
        slots: int64 [R, S], of each KV row; the first ones are used.
        counts: int64 [R], their numbers, with at least one positive.
        most: entries of a block.
    """
    blocks = (counts + most - 1) // most
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(blocks)
    number = torch.arange(len(rows), device=counts.device) - (blocks.cumsum(0) - blocks)[rows]
    base = counts[rows] // blocks[rows]
    more = counts[rows] % blocks[rows]
    fills = base + (number < more)
    start = base * number + torch.minimum(number, more)
    place = torch.arange(int(fills.max()), device=counts.device)
    places = start[:, None] + torch.minimum(place, fills[:, None] - 1)
    taken = slots[rows[:, None], places]
    keys, values, index = (part.flatten(0, 1)[rows[:, None], taken] for part in (store.keys, store.values, store.index))
    return keys, values, index, rows, fills


def _encodable(left: Tensor, codec: Codec, ends_prompt: bool, begins: Tensor) -> Tensor:
    """Return the entries to encode out of int64 [R]: whole blocks, and more at the end of a prompt.

    Then all of them, if they fill half a block, or half of one after whole ones if KV rows have blocks already.

    begins: bool [R], KV rows that have none.
    """
    left = left.clamp_min(0)
    part = left % codec.block
    if not ends_prompt:
        return left - part
    few = torch.where(begins, left, part) * 2 < codec.block
    return torch.where(few, left - part, left)


def _encode_alike(store: PackedParts, count: int, sinks: int, ends_prompt: bool) -> None:
    """Encode `count` entries of each KV row; all entries are real."""
    exact = store.exact
    body = store.bodies[-1]
    rows = store.batch * store.heads
    store.first += sinks
    taken = slice(store.first, store.first + count)
    codec = body.codec
    size = codec.block
    if count % size:
        slots = torch.arange(taken.start, taken.stop, device=store.device).expand(rows, -1)
        body.add(*blocks_of(exact, slots, torch.full((rows,), count, device=store.device), size))
    else:
        keys, values, index = (
            part[:, :, taken].reshape(-1, size, *part.shape[3:]) for part in (exact.keys, exact.values, exact.index)
        )
        body.add(keys, values, index, torch.arange(rows, device=store.device).repeat_interleave(count // size))
    left = torch.cat([torch.arange(store.first), torch.arange(taken.stop, exact.size)]).to(store.device)
    _replace(store, left.expand(store.batch, store.heads, -1), None, _room(codec, ends_prompt), reuse=not ends_prompt)


def _encode_rows(store: PackedParts, sinks: int, ends_prompt: bool) -> None:
    """Encode a different number of real entries of each KV row."""
    exact = store.exact
    body = store.bodies[-1]
    codec = body.codec
    room = _room(body.codec, ends_prompt)
    shape = store.batch, store.heads
    real = torch.ones(1, 1, 1, dtype=torch.bool, device=store.device) if exact.valid is None else exact.valid
    real = real.expand(*shape, exact.size)
    newest = real[..., store.first :]
    keep = torch.tensor([codec.newest(total) for total in store.totals().tolist()], device=store.device)
    left = newest.sum(-1).flatten() - sinks - keep
    counts = _encodable(left, codec, ends_prompt, body.counts == 0)
    if not bool(counts.any()):
        # No KV row gets more entries than there are slots more.
        store.due = exact.size + codec.block - int(left.max())
        return
    # Real slots first, in order.
    order = (~newest).to(torch.uint8).argsort(dim=-1, stable=True) + store.first
    body.add(*blocks_of(exact, order.flatten(0, 1)[:, sinks:], counts, codec.block))
    place = torch.arange(order.shape[-1], device=store.device)
    goes = (place >= sinks) & (place < sinks + counts.view(*shape, 1))
    stays = real.clone()
    stays.scatter_(2, order, newest.gather(2, order - store.first) & ~goes)
    if sinks:
        # The first ones of each KV row become slots of their own, filler where it has fewer.
        few = order[..., :sinks]
        there = newest.gather(2, few - store.first)
        stays.scatter_(2, few, torch.zeros_like(there))
        slots, there_too = _right_aligned(stays[..., store.first :], store.first)
        slots = torch.cat([torch.arange(store.first, device=store.device).expand(*shape, -1), few, slots], -1)
        whole = torch.cat([real[..., : store.first], there, there_too], -1)
        store.first += sinks
        _replace(store, slots, whole, room, reuse=not ends_prompt)
    else:
        narrow(store, stays, room, reuse=not ends_prompt)


def _room(codec: Codec, ends_prompt: bool) -> int:
    """Return the exact entries to reserve after an encoding."""
    return 0 if ends_prompt else min(MIN_ROOM, codec.block)


def narrow(store: PackedParts, stays: Tensor, room: int, *, reuse: bool = False) -> None:
    """Keep exact slots, bool [B, H, slots]: filler replaces dropped first ones, others close up.

    room: tokens to leave room for. reuse: as in `_replace`.
    """
    slots, real = _right_aligned(stays[..., store.first :], store.first)
    head = torch.arange(store.first, device=store.device).expand(*stays.shape[:2], -1)
    kept = torch.cat([head, slots], -1)
    there = torch.cat([stays[..., : store.first], real], -1)
    _replace(store, kept, there, room, reuse=reuse)


def _replace(store: PackedParts, slots: Tensor, real: Tensor | None, room: int, *, reuse: bool) -> None:
    """Replace the exact entries by slots [B, H, K] of the old ones.

    Args:
        store: of the entries.
        slots: int64 [B, H, K].
        real: bool, False for filler; None without filler.
        room: tokens to leave room for.
        reuse: keep buffers that are slightly larger than needed, so that recorded passes stay valid.
    """
    exact = store.exact
    kept = slots.shape[2]
    codec = store.codec
    fits = codec is not None and kept < exact.capacity <= store.most_exact(codec) + codec.block
    reuse = reuse and fits and not exact.shared
    lengths = None
    if real is not None and not (reuse and exact.valid is not None) and bool(real.all()):
        real = None
    if real is not None:
        lengths = tuple(real.sum(-1).amax(-1).tolist())
    exact.take(slots, real, kept + room, reuse=reuse, lengths=lengths)
    store.derived = {}
    store.due = 0


def _right_aligned(stays: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return slots int64 [B, H, K] of True in bool [B, H, N], from `start`, right-aligned; and which are real."""
    counts = stays.sum(-1, keepdim=True)
    most = int(counts.max())
    # False first, so that the last ones are those that stay, in order.
    slots = stays.to(torch.uint8).argsort(dim=-1, stable=True)[..., stays.shape[-1] - most :]
    real = torch.arange(most, device=stays.device) >= most - counts
    return slots + start, real
