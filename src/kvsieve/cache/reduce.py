"""Reducing a packed store: entries are dropped, or encoded and set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.cache.settle import narrow
from kvsieve.errors import UnsupportedOptionError
from kvsieve.types import Selection

if TYPE_CHECKING:
    from kvsieve.cache.packed_parts import PackedParts


def selected(store: PackedParts, selection: Selection) -> Tensor:
    """Slots that a selection keeps, bool [B, H, size]."""
    indices = selection.indices
    if indices.ndim == 2:
        indices = indices[:, None].expand(-1, store.heads, -1)
    if indices.shape[1] != store.heads:
        raise UnsupportedOptionError(
            f"the plan keeps entries for each of {indices.shape[1]} query heads, and encoded entries are those of "
            f"{store.heads} KV heads; leave per_query_head out, or codec= and rest="
        )
    real = selection.real()
    real = torch.ones_like(indices, dtype=torch.bool) if real is None else real
    real = (real[:, None] if real.ndim == 2 else real).expand_as(indices)
    rows = torch.arange(store.batch * store.heads, device=store.device)[:, None]
    # Filler names slot 0, or any other, and keeps none.
    places = (rows * store.size + indices.flatten(0, 1))[real.flatten(0, 1)]
    stays = torch.zeros(store.batch, store.heads, store.size, dtype=torch.bool, device=store.device)
    stays.view(-1)[places] = True
    return stays


def reduce(store: PackedParts, stays: Tensor, reserve: int) -> None:
    """Drop slots, bool [B, H, size], False for those that go. reserve: tokens to leave room for."""
    if store.is_sorted:
        stays = torch.zeros_like(stays).scatter_(2, store.order(), stays)
    at, end = store.first, store.first
    for body in store.bodies:
        end = at + body.width
        body.keep(stays[:, :, at:end].flatten(0, 1))
        at = end
    narrow(store, torch.cat([stays[:, :, : store.first], stays[:, :, end:]], 2), store.room(reserve))


def set_aside(store: PackedParts, selection: Selection, reserve: int) -> None:
    """Encode the slots that are not selected, in place of dropping them; those set aside before stay so."""
    rest, stays, valid = store.bodies[0], selected(store, selection), store.valid
    if store.is_sorted:
        aside = torch.zeros_like(stays)
        aside[:, :, store.first : store.first + rest.width] = True
        stays |= aside.gather(2, store.order())
    real = torch.ones_like(stays) if valid is None else valid.expand_as(stays)
    blocks = _blocks(store, (real & ~stays).flatten(0, 1), rest.codec.block)
    reduce(store, real & stays, reserve)
    if blocks is not None:
        rest.add(*blocks)


def _blocks(store: PackedParts, leaves: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Blocks of `size` entries of the slots bool [R, slots] of a store, as `Body.add` takes them; None for none.

    The last one of each KV row may be filled in part.
    """
    counts = leaves.sum(1)
    if not bool(counts.any()):
        return None
    blocks = (counts + size - 1) // size
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(blocks)
    number = torch.arange(len(rows), device=counts.device) - (blocks.cumsum(0) - blocks)[rows]
    fills = (counts[rows] - number * size).clamp_max(size)
    # Slots that leave first, in order; filler repeats a block's last one.
    order = (~leaves).to(torch.uint8).argsort(dim=1, stable=True)
    places = number[:, None] * size + torch.minimum(torch.arange(size, device=counts.device), fills[:, None] - 1)
    slots = order[rows[:, None], places]
    keys, values, index = (part.flatten(0, 1)[rows[:, None], slots] for part in (store.keys, store.values, store.index))
    return keys, values, index, rows, fills
