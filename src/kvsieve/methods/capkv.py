"""CapKV: Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective (arXiv 2604.25975).

An entry i with key k and value v gets the weight w = exp(tau <k, q>), with q the mean of the prompt's queries, rotated
to the next `n_future` positions. A = I + sum of w v v^T over the entries; the score is w v^T A^-1 v, averaged over the
query heads of a group. The first `sinks` tokens count in nothing and stay.

As in the authors' code in kvpress k and q are normalised, and w is divided by its largest in the head (the paper has
neither); A adds 1e-6 to the weights.

Differences from that code: queries are rotated back from their positions and their mean covers all chunks (see
expected_attention.py); A is inverted in float64; padded batches; with `every`, queries of generated tokens count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import first_real
from kvsieve.methods.expected_attention import FutureQueries
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext

_EPSILON = 1e-6


@register_method("capkv", title="CapKV", paper="arXiv 2604.25975", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class CapKV(FutureQueries, heads="own", query_aware=False):
    """Keep entries with values that the others do not span, weighted by the prompt's mean query.

    tau: sharpness of the weights, at least 0. sinks: first tokens that stay, without their queries. n_future: future
    positions that the rotation is averaged over.
    """

    tau: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.tau < math.inf:
            raise PlanError(f"CapKV: tau must be at least 0, got {self.tau!r}")
        super().__post_init__()

    def scores(self, ctx: LayerContext) -> Tensor:
        batch, heads, _, size = ctx.keys.shape
        dtype = score_dtype(ctx.keys.dtype)
        anchor = ctx.state["mean"].to(dtype) @ self.average_turn(ctx, dtype)
        anchor = F.normalize(anchor.view(batch, heads, -1, size), dim=-1)
        sinks = first_real(ctx, self.sinks)
        hidden = sinks if ctx.valid is None else sinks | ~ctx.valid
        hidden = hidden[:, :, None]
        logits = self.tau * (anchor @ F.normalize(ctx.keys.to(dtype), dim=-1).transpose(-1, -2)).clamp(-1, 1)
        highest = logits.masked_fill(hidden, float("-inf")).amax(-1, keepdim=True)
        weights = (logits - highest).exp().masked_fill(hidden, 0)
        values = ctx.values.to(dtype)
        unit = torch.eye(values.shape[3], dtype=torch.float64, device=values.device)
        total = torch.zeros_like(weights[:, :, 0])
        for weight in weights.unbind(2):
            scaled = values * (weight + _EPSILON).masked_fill(hidden[:, :, 0], 0).sqrt()[..., None]
            capacity = unit + (scaled.transpose(2, 3) @ scaled).double()
            leverage = ((values @ torch.linalg.inv(capacity).to(dtype)) * values).sum(-1)
            total += weight * leverage
        return (total / weights.shape[2]).masked_fill(sinks, float("inf"))
