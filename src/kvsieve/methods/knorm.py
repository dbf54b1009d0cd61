"""K-norm: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430).

Keys of small norm tend to attract attention: keep the smallest ||k|| per KV head. Needs no queries; nothing is
protected, since sinks have tiny norms in most models. Post-RoPE keys serve, since rotation preserves norms.

Differences from the reference: kvsieve's budgets, without a minimum prompt length (`prune_after`); kept entries in
ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor
from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method("knorm", title="K-norm", paper="arXiv 2406.11430", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class KNorm(ScoredEvictor, heads="own", query_aware=False, fixed_counts=True):
    """Keep the entries with the smallest key norms; uses no queries.

    The paper recommends ``skip_layers=2``.
    """

    def scores(self, ctx: LayerContext) -> Tensor:
        return -ctx.keys.to(score_dtype(ctx.keys.dtype)).norm(dim=-1)
