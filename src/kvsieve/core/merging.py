"""Merging of dropped entries into kept ones: the parts of a selection, the nearest kept entry, sums over entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.scoring import score_dtype
from kvsieve.core.selection import entries_at
from kvsieve.lazy import Tensor, torch
from kvsieve.types import LayerContext, Selection

Likeness = Literal["cosine", "dot"]

# Similarities of one block, [B, H, block, K], stay under about 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Parted:
    """Entries of a layer as a selection divides them: K kept ones, and E dropped ones that may merge into them.

    Attributes:
        kept: int64 [B, H, K], slots of the kept entries, ascending after filler.
        open: bool [B, H, K], kept entries that a merge may change; False for filler.
        places: int64 [B, H, N], the place of each slot among the kept entries, -1 for others.
        fixed: bool [B, H, N], entries that take no part.
        dropped: int64 [B, H, E], slots of the dropped entries, ascending after filler.
        merging: bool [B, H, E], False for filler.
    """

    kept: Tensor
    open: Tensor
    places: Tensor
    fixed: Tensor
    dropped: Tensor
    merging: Tensor

    def keys(self, ctx: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the keys of kept and of dropped entries, [B, H, K, D] and [B, H, E, D], as scores are computed."""
        return self._both(ctx.keys)

    def values(self, ctx: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the values of kept and of dropped entries, [B, H, K, Dv] and [B, H, E, Dv], as `keys`."""
        return self._both(ctx.values)

    def weights(self, ctx: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the weights of kept and of dropped entries, [B, H, K] and [B, H, E]."""
        if ctx.log_weight is None:
            dtype = score_dtype(ctx.keys.dtype)
            return torch.ones_like(self.kept, dtype=dtype), torch.ones_like(self.dropped, dtype=dtype)
        kept, dropped = self._both(ctx.log_weight)
        return kept.exp(), dropped.exp()

    def _both(self, part: Tensor) -> tuple[Tensor, Tensor]:
        dtype = score_dtype(part.dtype)
        return entries_at(part, self.kept).to(dtype), entries_at(part, self.dropped).to(dtype)


def part(ctx: LayerContext, selection: Selection, fixed: Tensor) -> Parted | None:
    """Divide a layer's entries; None if none is dropped.

    Args:
        ctx: the layer.
        selection: of its entries.
        fixed: bool [B, H, N], entries that take no part: kept unchanged, or dropped.
    """
    most = _most_dropped(ctx, selection)
    if most <= 0:
        return None
    batch, heads, size = ctx.keys.shape[:3]
    kept, real = selection.indices, selection.real_of_heads()
    kept = (kept[:, None] if kept.ndim == 2 else kept).expand(batch, heads, -1)
    real = torch.ones_like(kept, dtype=torch.bool) if real is None else real.expand_as(kept)
    places = torch.full((batch, heads, size + 1), -1, dtype=torch.int64, device=kept.device)
    order = torch.arange(kept.shape[2], device=kept.device).expand_as(kept)
    places = places.scatter_(2, kept.masked_fill(~real, size), order)[..., :size]
    leaving = (places < 0) & ~fixed
    if ctx.valid is not None:
        leaving = leaving & ctx.valid
    dropped = leaving.to(torch.uint8).argsort(dim=-1, stable=True)[..., size - most :]
    return Parted(kept, real & ~fixed.gather(2, kept), places, fixed, dropped, leaving.gather(2, dropped))


def _most_dropped(ctx: LayerContext, selection: Selection) -> int:
    """Return a bound of the entries that a head drops, without waiting for the device."""
    if selection.head_lengths is not None:
        kept = tuple(map(min, selection.head_lengths))
    else:
        kept = selection.lengths or (selection.indices.shape[-1],) * len(ctx.stored)
    return max(stored - count for stored, count in zip(ctx.stored, kept, strict=True))


def nearest(dropped: Tensor, kept: Tensor, targets: Tensor, likeness: Likeness = "cosine") -> tuple[Tensor, Tensor]:
    """Find the most similar target of each dropped entry, in blocks of dropped entries.

    Args:
        dropped: keys [B, H, E, D].
        kept: keys [B, H, K, D].
        targets: bool [B, H, K], the kept entries to choose from.
        likeness: of keys: their cosine or their product.

    Returns:
        The similarity [B, H, E], -inf without any target, and the place among the kept entries, int64 [B, H, E].
    """
    if likeness == "cosine":
        dropped, kept = unit(dropped), unit(kept)
    batch, heads, size = kept.shape[:3]
    block = max(16, _BLOCK_ELEMENTS // max(1, batch * heads * size))
    found = []
    for some in dropped.split(block, 2):
        alike = some @ kept.transpose(-1, -2)
        found.append(alike.masked_fill_(~targets[:, :, None], float("-inf")).max(-1))
    return torch.cat([best.values for best in found], 2), torch.cat([best.indices for best in found], 2)


def unit(keys: Tensor) -> Tensor:
    """Scale the last dimension to length 1; zeros stay."""
    return keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def collect(parts: Tensor, place: Tensor, size: int) -> Tensor:
    """Sum parts [B, H, E] or [B, H, E, D] by place, int64 [B, H, E]: [B, H, size] or [B, H, size, D]."""
    shape = (*parts.shape[:2], size, *parts.shape[3:])
    where = place if parts.ndim == 3 else place[..., None].expand_as(parts)
    return torch.zeros(shape, dtype=parts.dtype, device=parts.device).scatter_add_(2, where, parts)


def best_of_groups(scores: Tensor, group: Tensor, count: int) -> Tensor:
    """Mark the best entry of each group, the lowest slot among ties.

    Args:
        scores: [B, H, N].
        group: int64 [B, H, N], the number of each entry's group, or -1 for none.
        count: number of groups.

    Returns:
        bool [B, H, N].
    """
    where = group.clamp_min(0)
    inside = group >= 0
    low = torch.full((*scores.shape[:2], count), float("-inf"), dtype=scores.dtype, device=scores.device)
    top = low.scatter_reduce(2, where, scores.masked_fill(~inside, float("-inf")), "amax")
    slots = torch.arange(scores.shape[2], device=scores.device).expand_as(group)
    tied = inside & (scores == top.gather(2, where))
    first = torch.full_like(low, scores.shape[2], dtype=torch.int64)
    first = first.scatter_reduce(2, where, slots.masked_fill(~tied, scores.shape[2]), "amin")
    return tied & (slots == first.gather(2, where))
