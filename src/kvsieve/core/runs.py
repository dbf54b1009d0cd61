"""Runs of consecutive entries with similar keys."""

from __future__ import annotations

from kvsieve.core.merging import best_of_groups, unit
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.types import LayerContext


def closed_up(ctx: LayerContext) -> Tensor:
    """Return the slots of a layer in order, padding and filler first: int64 [B, H, N]."""
    batch, heads, size = ctx.keys.shape[:3]
    if ctx.valid is None:
        return torch.arange(size, device=ctx.keys.device).expand(batch, heads, size)
    return ctx.valid.expand(batch, heads, size).to(torch.uint8).argsort(dim=-1, stable=True)


def links(ctx: LayerContext, order: Tensor, fixed: Tensor) -> Tensor:
    """Return the cosine of each entry's key with the key of the entry before it, [B, H, N] in the given order.

    Args:
        ctx: the layer.
        order: slots, from `closed_up`.
        fixed: bool [B, H, N] by slot, entries without links.

    Returns:
        -inf for the first entry, for padding, and beside fixed entries.
    """
    keys = unit(ctx.keys.to(score_dtype(ctx.keys.dtype)))
    keys = keys.gather(2, order[..., None].expand(*order.shape, keys.shape[-1]))
    out = torch.full(order.shape, float("-inf"), dtype=keys.dtype, device=keys.device)
    out[..., 1:] = (keys[..., 1:, :] * keys[..., :-1, :]).sum(-1)
    loose = ~fixed if ctx.valid is None else ~fixed & ctx.valid
    loose = loose.gather(2, order)
    apart = ~loose
    apart[..., 1:] |= ~loose[..., :-1]
    return out.masked_fill(apart, float("-inf"))


def pivots(scores: Tensor, joined: Tensor) -> Tensor:
    """Mark the best entry of each run, bool [B, H, N]; joined: bool [B, H, N], entries in the run of the one before.

    The first entry is never joined.
    """
    return best_of_groups(scores, (~joined).cumsum(-1) - 1, scores.shape[-1])


def claimed(link: Tensor, stays: Tensor, least: float) -> Tensor:
    """Assign dropped entries to the kept one before or after them, whichever is on their side of the weakest link.

    Runs between two kept entries are cut at their weakest link, the first among equals. An entry is not assigned over a
    link below `least`.

    Args:
        link: from `links`, [B, H, N].
        stays: bool [B, H, N], the kept entries, in the same order.
        least: cosine.

    Returns:
        The place of the kept entry in this order, int64 [B, H, N], or -1 for none, and for kept entries.
    """
    size = link.shape[-1]
    place = torch.arange(size, device=link.device).expand_as(stays)
    before = place.masked_fill(~stays, -1).cummax(-1).values
    after = place.masked_fill(~stays, size).flip(-1).cummin(-1).values.flip(-1)
    # A gap is numbered by the kept entries before it; its links are those of its entries, and of the kept one after it.
    gap = stays.long().cumsum(-1)
    of_link = gap - stays.long()
    weakest = best_of_groups(-link.nan_to_num(neginf=-2.0), of_link, size + 1)
    cut = place.masked_fill(~weakest, -1).cummax(-1).values
    # Before the cut of its gap, an entry is behind those of earlier gaps only, which are not behind `before`.
    to = after.where((cut > before) & (after < size), before)
    weak = (~(link >= least)).long().cumsum(-1)
    crossed = weak.gather(2, torch.maximum(to, place)) - weak.gather(2, torch.minimum(to, place).clamp_min(0))
    return to.masked_fill(stays | (to < 0) | (crossed > 0), -1)
