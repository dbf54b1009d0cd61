"""Queries of a turn's last tokens, for eviction while decoding.

Rows with fewer tokens than the window have padding among them. At the end of a prompt that padding is stored, so an
evictor sees by the entries which queries are real. Later it is evicted: it is then restored for the evictor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsieve.core.selection import entries_at
from kvsieve.types import LayerContext, Quotas, Selection

_QUERIES = "recent"
_REAL = "recent_real"


def recent_queries(
    state: dict[str, Any], query: Tensor, counts: tuple[int, ...], window: int, *, decoding: bool
) -> Tensor:
    """Return this pass's queries, while decoding after those of earlier tokens, [B, Hq, L', D].

    Args:
        state: the layer's; the last `window` queries are kept in it.
        query: [B, Hq, L, D], this pass's.
        counts: real ones per row, after the padding.
        window: the evictor's observation window.
        decoding: False for the end of a prompt.
    """
    before = state.get(_QUERIES)
    if decoding and before is not None and query.shape[2] < window:
        new = query.shape[2]
        stored = before.shape[2]
        query = torch.cat([before, query], 2)
        if _REAL in state or min(counts) < new:
            state[_REAL] = state.get(_REAL, torch.tensor(stored)).clamp(max=stored) + torch.tensor(counts)
        if min(counts) < new:
            # Padding precedes the queries of its row.
            query = torch.stack([row.roll(new - count, 1) for row, count in zip(query, counts, strict=True)])
    else:
        state.pop(_REAL, None)
        if min(counts) < min(window, query.shape[2]):
            state[_REAL] = torch.tensor(counts)
    if _REAL in state and int(state[_REAL].min()) >= query.shape[2]:
        del state[_REAL]
    state[_QUERIES] = query[:, :, -window:].clone()  # A whole prompt's queries are not kept.
    return query


def aligned(ctx: LayerContext) -> tuple[LayerContext, Tensor | None]:
    """Insert padding among the entries where the queries have some, so that the last L of N entries are the queries'.

    Returns:
        The context, and int64 [B, 1, N'], the slots of its entries in the store (0 for the padding); the unchanged
        context and None, if no query is padding, or if the padding is stored.
    """
    if ctx.step.phase == "prefill" or _REAL not in ctx.state:
        return ctx, None
    size = ctx.query.shape[2]
    stored = ctx.keys.shape[2]
    gaps = [size - count for count in ctx.state[_REAL].tolist()]
    gap = torch.tensor(gaps).to(ctx.keys.device, non_blocking=True)[:, None, None]
    place = torch.arange(stored + max(gaps), device=ctx.keys.device)
    # A row of the store, moved to the left by its gap but for the entries of its real queries.
    behind = place >= place.numel() - size + gap
    slots = place - max(gaps) + gap.masked_fill(behind, 0).expand(-1, 1, place.numel())
    padding = (place >= place.numel() - size) & ~behind
    real = (slots >= 0) & ~padding
    slots = slots.clamp_min(0).masked_fill(padding, 0)
    wide = slots.expand(-1, ctx.keys.shape[1], -1)
    if ctx.valid is not None:
        real = real & ctx.valid.gather(2, slots.expand(-1, ctx.valid.shape[1], -1))
    quotas = ctx.quotas
    return replace(
        ctx,
        keys=entries_at(ctx.keys, wide),
        values=entries_at(ctx.values, wide),
        index=ctx.index.gather(2, wide).masked_fill(~real, -1),
        valid=real,
        protected=None if ctx.protected is None else ctx.protected.gather(2, wide) & real,
        quotas=None if quotas is None else Quotas(quotas.segment.gather(2, wide).masked_fill(~real, 0), quotas.counts),
        log_weight=None if ctx.log_weight is None else ctx.log_weight.gather(2, wide).masked_fill(~real, 0),
    ), slots


def stored_slots(selection: Selection, slots: Tensor | None) -> Selection:
    """Return a selection of an aligned context's entries as one of the store's; slots: from `aligned`."""
    if slots is None:
        return selection
    chosen = selection.indices
    if chosen.ndim == 2:
        return replace(selection, indices=slots[:, 0].gather(1, chosen))
    return replace(selection, indices=slots.expand(-1, chosen.shape[1], -1).gather(2, chosen))
