"""Helpers of methods for long answers."""

from __future__ import annotations

from collections.abc import Iterator

from kvsieve.core.scoring import window_weights
from kvsieve.core.selection import pack_ragged, top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import ScoredEvictor, Wrapper, apply_protection, hide_padding, last_real, per_head
from kvsieve.methods.h2o import moved
from kvsieve.types import AttentionQueries, LayerContext, Selection

# Queries per block where all of a pass are looked at.
_BLOCK = 256


def weights_by_block(ctx: LayerContext, first: int = 0) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the causal weights of a pass's queries from `first` on, in blocks of queries and entries.

    Yields:
        The queries, the entries, and their weights [B, H, G, queries, entries].
    """
    heads, length = ctx.keys.shape[1:3]
    new = ctx.query.shape[2]
    for start in range(first, new, _BLOCK):
        queries = slice(start, min(start + _BLOCK, new))
        seen = length - new + queries.stop
        valid = None if ctx.valid is None else ctx.valid[:, :, :seen]
        end = 0
        for weights in window_weights(ctx.asks(ctx.query[:, :, queries]), ctx.keys[:, :, :seen], valid=valid):
            yield queries, slice(end, end + weights.shape[-1]), weights.unflatten(1, (heads, -1))
            end += weights.shape[-1]


def before_window(ctx: LayerContext, window: int) -> tuple[AttentionQueries, Tensor, Tensor]:
    """Return the last `window` queries of each row, and the entries before theirs.

    Returns:
        The queries; bool [B or 1, 1 or H, N], the older real entries; bool [B or 1, 1 or H, W, N], the entries that
        each query looks at: none where it is padding.
    """
    asked = ctx.asks(ctx.query[:, :, -window:])
    count = asked.query.shape[2]
    older = ~last_real(ctx, window)
    if ctx.valid is None:
        return asked, older, older[:, :, None].expand(-1, -1, count, -1)
    older = older & ctx.valid
    return asked, older, older[:, :, None] & ctx.valid[:, :, -count:, None]


def limited(
    evictor: ScoredEvictor | Wrapper, ctx: LayerContext, scores: Tensor, stays: Tensor, counts: tuple[int, ...]
) -> Selection | None:
    """Select the entries that stay by a rule, and within the budget; None keeps everything.

    The budget is a limit here: "100%" is none. Rows within the budget's floor keep everything.

    Args:
        evictor: chooses.
        ctx: the layer.
        scores: [B, X, N], the best of which stay if too many would; +inf for entries that must.
        stays: bool [B, X, N], entries that stay by the rule.
        counts: the limit per row.
    """
    budget = evictor.budget
    if budget.ratio == 1 and not evictor.keeps_prompt:
        counts = ctx.stored
    if budget.floor:
        whole = torch.tensor([length <= budget.floor for length in ctx.step.lengths])
        stays = stays | whole.to(stays.device, non_blocking=True)[:, None, None]
    scores = hide_padding(ctx, scores.masked_fill(~stays, float("-inf")))
    scores, counts = apply_protection(ctx, scores, counts)
    keep = top_mask(scores, counts) & ~scores.isneginf()
    real = torch.ones_like(keep) if ctx.valid is None else per_head(ctx.valid, keep.shape[1]).expand_as(keep)
    # The host waits once.
    kept, stored = torch.stack([keep, real]).sum(-1).tolist()
    return None if kept == stored else pack_ragged(keep, kept)


def carried(before: Tensor, known: Tensor, index: Tensor) -> Tensor:
    """Return what is known of tokens, at their current slots.

    Args:
        before: [B, H, M].
        known: int32 [B, H, M], the token of each; -1 for filler.
        index: int32 [B, H, N], the same for the current slots.

    Returns:
        [B, H, N], 0 for new tokens.
    """
    if torch.equal(known, index[..., : known.shape[-1]]):
        return F.pad(before, (0, index.shape[-1] - known.shape[-1]))
    return moved(before, known, index)
