"""TOVA: Transformers are Multi-State RNNs (arXiv 2401.06104).

After the prompt and after every generated token the entries with the least attention from the newest token are evicted:
one set per layer, by the mass averaged over all query heads. The newest entry competes like the others.

Differences from the reference: `every` may be larger to evict in blocks, or None to act at the end of prompts only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import mass_of
from kvsieve.lazy import Tensor
from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method("tova", title="TOVA", paper="arXiv 2401.06104", phase="end of prompt, decode", budget="20%")
@dataclass(frozen=True, kw_only=True)
class TOVA(ScoredEvictor, heads="all", query_aware=True):
    """Keep the entries the newest token attends to, one set per layer, while decoding, too."""

    every: int | None = 1

    @property
    def window(self) -> int:
        return 1

    def scores(self, ctx: LayerContext) -> Tensor:
        mass = mass_of(ctx, -1)
        return ctx.ranks.mean(mass.mean(1, keepdim=True)).expand(-1, ctx.keys.shape[1], -1)
