"""CriticalKV: Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (arXiv 2502.03805).

An entry's effect on a layer's output also depends on its projected value. Half of a budget goes to the best by `base`'s
scores s; the rest to the largest (s + 1e-4) w, where w is the L1 norm of the value after a query head's output
projection, averaged over the heads of the group.

Differences from the reference: entries that `base` protects precede both; scores that can be negative (K-norm's,
KeyDiff's) are first shifted to a minimum of 0 per row, or a large w would count against an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import group_mean, score_dtype
from kvsieve.core.selection import top_mask
from kvsieve.errors import UnsupportedModelError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import Wrapper, hide_padding, model_facts, scored_by_name
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext

# Projected values of one block, [B, entries, C] in float32, stay under about 64 MiB.
_BLOCK_ELEMENTS = 1 << 24
_FLOOR = 1e-4


@dataclass(frozen=True, kw_only=True)
class CriticalKV(Wrapper, needs=("output_weight",), heads="own", query_aware=False):
    """Half of the budget by `base`'s scores, half by scores times the norm of projected values.

    The model must have a plain output projection. A base should not weigh values itself: for ExpectedAttention set
    ``use_vnorm=False``.
    """

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        return critical_ranks(ctx, hide_padding(ctx, self.base.scores(ctx)), tuple(count // 2 for count in kept))


def critical_ranks(ctx: LayerContext, scores: Tensor, first: tuple[int, ...] | Tensor) -> Tensor:
    """Return the ranks of both stages: +inf for the `first` best by scores, then scores times projected norms.

    Args:
        ctx: the layer.
        scores: [B, H, N] or [B, Hq, N], -inf for padding.
        first: entries of the first stage, per row, or int64 [B, H].
    """
    best = top_mask(scores, first) | (scores >= torch.finfo(scores.dtype).max)
    lowest = scores.masked_fill(best | scores.isneginf(), 0).amin(-1, keepdim=True).clamp_max(0)
    weight = projected_norm(ctx)
    if scores.shape[1] != weight.shape[1]:
        weight = group_mean(weight, scores.shape[1])
    ranks = (scores - lowest + _FLOOR) * weight
    return ranks.masked_fill(scores.isneginf(), float("-inf")).masked_fill(best, float("inf"))


def projected_norm(ctx: LayerContext, power: int = 1) -> Tensor:
    """Return the norm of each stored value after each query head's output projection, [B, Hq, N]."""
    projection = model_facts(ctx).output_weight(ctx.layer_idx)
    batch, heads, length, size = ctx.values.shape
    query_heads = ctx.query.shape[1]
    dtype = score_dtype(ctx.values.dtype)
    if projection.shape[:2] != (query_heads, size):
        raise UnsupportedModelError(
            f"layer {ctx.layer_idx} has an output projection for heads of {tuple(projection.shape[:2])}, its attention "
            f"puts out {(query_heads, size)}"
        )
    block = max(1, _BLOCK_ELEMENTS // (batch * projection.shape[2]))
    out = torch.empty(batch, query_heads, length, dtype=dtype, device=ctx.values.device)
    for head in range(query_heads):
        own = projection[head].to(ctx.values.device, dtype)
        values = ctx.values[:, head * heads // query_heads]
        for start in range(0, length, block):
            part = values[:, start : start + block].to(dtype) @ own
            out[:, head, start : start + block] = part.norm(p=power, dim=-1)
    return out


@register_method("criticalkv", title="CriticalKV", paper="arXiv 2502.03805", phase="end of prompt")
def criticalkv(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Keep entries by the scores of another method, `base`; half of the budget weights them by value norm."""
    return Plan(evict=CriticalKV(base=scored_by_name("criticalkv", base, budget, skip_layers, every)))
