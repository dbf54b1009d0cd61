"""OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference (arXiv 2510.07651).

The score of an entry is the squared change of the attention outputs o of the last W queries, to first order, if it were
zeroed. With its weight a, its logit z and its value v, zeroing the value changes an output by a v, the key by
a z (v - o), and both by their sum. So the scores, summed over the queries, are

    "value"  a^2 |v|^2        "key"  a^2 z^2 |v - o|^2        "joint"  a^2 |v + z (v - o)|^2

They replace SnapKV's mass: pooled along the sequence, then averaged over the group; the window itself stays.

Differences from the reference: one set per KV head (`per_query_head=True` restores one per query head); the window is
the last queries of the prompt, and after `every` generated tokens those then (the original adds up all steps); the
logits are those of the softmax, capped where the model caps them; o is computed from the weights in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.scoring import Pool, group_mean, pool, score_dtype, weights_of
from kvsieve.core.softmax import cap
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method(
    "obcache", title="OBCache", paper="arXiv 2510.07651", phase="end of prompt", derive=defaults.pooling, budget="20%"
)
@dataclass(frozen=True, kw_only=True)
class OBCache(SnapKV, heads="own", query_aware=True, fixed_counts=True):
    """Keep the entries without which the last queries' attention outputs would change most.

    form: what is zeroed: the "value", the "key", or "joint" for both. The rest as in SnapKV; ``kernel=1`` is the
    paper's form over H2O.
    """

    pooling: Pool = "max"
    form: Literal["joint", "value", "key"] = "joint"

    def context_scores(self, ctx: LayerContext) -> Tensor:
        window = min(self.window, ctx.query.shape[2])
        scores = effects(ctx, window, self.form)[..., :-window]
        scores = pool(scores, self.width(ctx), self.pooling, ctx.valid)
        return scores if self.per_query_head else group_mean(scores, ctx.keys.shape[1])


def effects(ctx: LayerContext, window: int, form: str) -> Tensor:
    """Return the squared change of the last `window` outputs without each entry, [B, Hq, N]."""
    heads = ctx.keys.shape[1]
    query = ctx.query[:, :, -window:]
    dtype = score_dtype(query.dtype)
    query = query.to(dtype).unflatten(1, (heads, -1)) * ctx.scale
    output = None if form == "value" else _outputs(ctx, window, dtype)
    start = 0
    parts = []
    for weights in weights_of(ctx, window):
        weights = weights.to(dtype).unflatten(1, (heads, -1))
        span = slice(start, start + weights.shape[-1])
        start = span.stop
        values = ctx.values[:, :, span].to(dtype)[:, :, None]
        size = values.square().sum(-1)[:, :, :, None]
        if output is None:
            change = size
        else:
            keys = ctx.keys[:, :, span].to(dtype)[:, :, None]
            logits = cap(query @ keys.transpose(-1, -2), ctx)
            shared = output @ values.transpose(-1, -2)
            apart = size - 2 * shared + output.square().sum(-1, keepdim=True)
            change = logits.square() * apart
            if form == "joint":
                change = size + 2 * logits * (size - shared) + change
        parts.append((weights.square() * change).sum(3).flatten(1, 2))
    return torch.cat(parts, -1)


def _outputs(ctx: LayerContext, window: int, dtype: torch.dtype) -> Tensor:
    """Return the attention outputs of the last `window` queries, [B, H, G, W, Dv]."""
    start = 0
    total: Tensor | None = None
    for weights in weights_of(ctx, window):
        weights = weights.to(dtype).unflatten(1, (ctx.keys.shape[1], -1))
        values = ctx.values[:, :, start : start + weights.shape[-1]].to(dtype)[:, :, None]
        start += weights.shape[-1]
        part = weights @ values
        total = part if total is None else total + part
    assert total is not None
    return total
