"""Encoding the entries that have left the newest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.cache.base import MIN_ROOM
from kvsieve.cache.body import Body
from kvsieve.cache.store import DenseStore

if TYPE_CHECKING:
    from kvsieve.cache.packed_parts import PackedParts
    from kvsieve.roles import Codec


def settle(store: PackedParts, codec: Codec) -> None:
    """Encode the oldest exact entries of each KV head, as many whole blocks as leave enough of the newest."""
    body, exact = store.bodies[-1], store.exact
    begins = not body.width and not store.first
    sinks = codec.sinks if begins else 0
    room = exact.size - store.first - sinks
    if room <= codec.block:
        return
    if exact.valid is None and body.is_even:
        blocks = (room - codec.newest(max(store.lengths))) // codec.block
        if blocks > 0:
            store.first += sinks
            _encode_alike(store, body, blocks)
    elif room >= codec.newest(min(store.totals().tolist())) + codec.block:
        # A KV head with fewer entries than others leaves fewer of them exact.
        _encode_rows(store, body, sinks)


def _encode_alike(store: PackedParts, body: Body, blocks: int) -> None:
    """Encode `blocks` blocks of each KV row, all of whose entries are real."""
    size, exact = body.codec.block, store.exact
    taken = slice(store.first, store.first + blocks * size)
    keys, values, index = (
        part[:, :, taken].reshape(-1, size, *part.shape[3:]) for part in (exact.keys, exact.values, exact.index)
    )
    rows = torch.arange(store.batch * store.heads, device=store.device).repeat_interleave(blocks)
    body.add(keys, values, index, rows)
    left = torch.cat([torch.arange(store.first), torch.arange(taken.stop, exact.size)]).to(store.device)
    _replace(store, left.expand(store.batch, store.heads, -1), None, min(MIN_ROOM, size))


def _encode_rows(store: PackedParts, body: Body, sinks: int) -> None:
    """Encode each KV row's own number of blocks of its real entries."""
    exact, codec, size = store.exact, body.codec, body.codec.block
    room = min(MIN_ROOM, size)
    shape = store.batch, store.heads
    real = torch.ones(1, 1, 1, dtype=torch.bool, device=store.device) if exact.valid is None else exact.valid
    real = real.expand(*shape, exact.size)
    newest = real[..., store.first :]
    own = newest.sum(-1)
    keep = torch.tensor([codec.newest(each) for each in store.totals().tolist()], device=store.device).view(shape)
    blocks = ((own - sinks - keep) // size).clamp_min(0)
    if not bool(blocks.any()):
        return
    # Real slots first, in order.
    order = (~newest).to(torch.uint8).argsort(dim=-1, stable=True) + store.first
    rows = torch.arange(shape[0] * shape[1], device=store.device).repeat_interleave(blocks.flatten())
    number = torch.arange(len(rows), device=store.device)
    before = blocks.flatten().cumsum(0) - blocks.flatten()
    start = sinks + (number - before[rows]) * size
    places = start[:, None] + torch.arange(size, device=store.device)
    slots = order.flatten(0, 1)[rows].gather(1, places)
    keys, values, index = (part.flatten(0, 1)[rows[:, None], slots] for part in (exact.keys, exact.values, exact.index))
    body.add(keys, values, index, rows)
    stays = real.clone()
    stays.flatten(0, 1)[rows[:, None], slots] = False
    if sinks:
        # The first ones of each KV row become slots of their own, filler where it has fewer.
        few = order[..., :sinks]
        there = newest.gather(2, few - store.first)
        stays.scatter_(2, few, torch.zeros_like(there))
        slots, there_too = _right_aligned(stays[..., store.first :], store.first)
        slots = torch.cat([torch.arange(store.first, device=store.device).expand(*shape, -1), few, slots], -1)
        whole = torch.cat([real[..., : store.first], there, there_too], -1)
        store.first += sinks
        _replace(store, slots, whole, room)
    else:
        narrow(store, stays, room)


def narrow(store: PackedParts, stays: Tensor, room: int) -> None:
    """Keep exact slots, bool [B, H, slots]: filler takes the place of first ones that go, others close up.

    room: tokens to leave room for.
    """
    slots, real = _right_aligned(stays[..., store.first :], store.first)
    head = torch.arange(store.first, device=store.device).expand(*stays.shape[:2], -1)
    _replace(store, torch.cat([head, slots], -1), torch.cat([stays[..., : store.first], real], -1), room)


def _replace(store: PackedParts, slots: Tensor, real: Tensor | None, room: int) -> None:
    """Make new exact entries of slots [B, H, K] of the old ones; real: bool, False for filler."""
    old, fresh = store.exact, DenseStore()

    def gathered(part: Tensor) -> Tensor:
        at = slots if part.ndim == 3 else slots[..., None].expand(-1, -1, -1, part.shape[3])
        out = part.new_zeros(*slots.shape[:2], slots.shape[2] + room, *part.shape[3:])
        out[:, :, : slots.shape[2]] = part.gather(2, at)
        return out

    fresh._keys, fresh._values, fresh._index = (gathered(part) for part in (old.keys, old.values, old.index))
    fresh.size = slots.shape[2]
    fresh.lengths = (fresh.size,) * len(slots)
    if real is not None and not bool(real.all()):
        fresh.valid_buffer = torch.ones(*slots.shape[:2], fresh.size + room, dtype=torch.bool, device=slots.device)
        fresh.valid_buffer[:, :, : fresh.size] = real
        fresh._index[:, :, : fresh.size].masked_fill_(~real, -1)
        fresh.lengths = tuple(real.sum(-1).amax(-1).tolist())
    store.exact = fresh
    store.derived = {}


def _right_aligned(stays: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Slots int64 [B, H, K], counted from `start`, where bool [B, H, N] is true, filler on the left; which are real."""
    counts = stays.sum(-1, keepdim=True)
    most = int(counts.max())
    # False first, so that the last ones are those that stay, in order.
    slots = stays.to(torch.uint8).argsort(dim=-1, stable=True)[..., stays.shape[-1] - most :]
    real = torch.arange(most, device=stays.device) >= most - counts
    return slots + start, real
