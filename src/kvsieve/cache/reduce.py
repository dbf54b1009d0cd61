"""Eviction from a packed store: entries are dropped, or encoded and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.cache.quantize import blocks_of, narrow
from kvsieve.cache.regroup import keep_entries
from kvsieve.errors import UnsupportedOptionError
from kvsieve.types import Selection

if TYPE_CHECKING:
    from kvsieve.cache.packed_parts import PackedParts


def selected(store: PackedParts, selection: Selection) -> Tensor:
    """Return the kept slots of a selection, bool [B, H, size]."""
    indices = selection.indices
    if indices.ndim == 2:
        indices = indices[:, None].expand(-1, store.heads, -1)
    if indices.shape[1] != store.heads:
        raise UnsupportedOptionError(
            f"the plan keeps entries for each of {indices.shape[1]} query heads, and encoded entries are those of "
            f"{store.heads} KV heads; leave per_query_head out, or codec= and rest="
        )
    real = selection.real_of_heads()
    real = torch.ones_like(indices, dtype=torch.bool) if real is None else real.expand_as(indices)
    rows = torch.arange(store.batch * store.heads, device=store.device)[:, None]
    # Filler names slot 0, or any other, and keeps none.
    places = (rows * store.size + indices.flatten(0, 1))[real.flatten(0, 1)]
    stays = torch.zeros(store.batch, store.heads, store.size, dtype=torch.bool, device=store.device)
    stays.view(-1)[places] = True
    return stays


def reduce(store: PackedParts, stays: Tensor, reserve: int) -> None:
    """Drop slots that are False in bool [B, H, size]. reserve: tokens to leave room for."""
    if store.is_sorted:
        stays = torch.zeros_like(stays).scatter_(2, store.order(), stays)
    at = store.first
    end = store.first
    for body in store.bodies:
        end = at + body.width
        keep_entries(body, stays[:, :, at:end].flatten(0, 1))
        at = end
    narrow(store, torch.cat([stays[:, :, : store.first], stays[:, :, end:]], 2), store.room(reserve))


def quantize_evicted(store: PackedParts, selection: Selection, reserve: int, asked: Tensor | None = None) -> None:
    """Encode unselected slots instead of dropping them; earlier ones stay encoded. asked: as in `BlockPool.encode`."""
    rest = store.bodies[0]
    stays = selected(store, selection)
    valid = store.valid
    if store.is_sorted:
        aside = torch.zeros_like(stays)
        aside[:, :, store.first : store.first + rest.width] = True
        stays |= aside.gather(2, store.order())
    real = torch.ones_like(stays) if valid is None else valid.expand_as(stays)
    leaves = (real & ~stays).flatten(0, 1)
    counts = leaves.sum(1)
    # Slots that leave first, in order.
    order = (~leaves).to(torch.uint8).argsort(dim=1, stable=True)
    blocks = blocks_of(store, order, counts, rest.codec.block) if bool(counts.any()) else None
    reduce(store, real & stays, reserve)
    if blocks is not None:
        rest.add(*blocks, asked)
