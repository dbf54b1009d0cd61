"""ZigZagKV: Dynamic KV Cache Compression for Long-context Modeling based on Layer Uncertainty (arXiv 2412.09036).

A layer's uncertainty is the fewest entries with `target` of the last W queries' attention, averaged over its heads.
Every layer keeps a least budget; the rest of the total is divided in proportion to uncertainty. The base, by default
SnapKV, chooses each layer's entries. Layers shrink as later ones come.

Differences from the reference: attention is summed over the window before sorting, and includes the window's own
entries; the least budget is our choice, half of the uniform one, without the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.allocation import tokens_reaching
from kvsieve.core.scoring import mass_of
from kvsieve.errors import PlanError
from kvsieve.methods.allocators import Cascade, observed
from kvsieve.methods.base import ScoredEvictor, check_share, scored_by_name
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class ZigZagKV(Cascade, heads="all", query_aware=True):
    """Divide the budget among layers by how many entries their attention needs: ``ZigZagKV(base=SnapKV(budget=0.2))``.

    base: ranks entries and has the budget, the mean over layers; its window, or the last 32 queries, weigh layers.
    target: the part of the attention, in (0, 1]. floor: the part of the budget that every layer keeps, in [0, 1].
    """

    base: ScoredEvictor = SnapKV(budget=Budget(ratio=0.2))
    target: float = 0.9
    floor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target <= 1:
            raise PlanError(f"ZigZagKV: target must be a share in (0, 1], got {self.target!r}")
        check_share(self, "floor", self.floor)

    @property
    def window(self) -> int:
        return observed(self.base)

    def least(self, budget: int) -> int:
        return int(budget * self.floor)

    def weigh(self, ctx: LayerContext) -> list[float]:
        mass = mass_of(ctx, -self.window)
        return ctx.ranks.mean(tokens_reaching(mass, self.target)).tolist()


@register_method("zigzagkv", title="ZigZagKV", paper="arXiv 2412.09036", phase="end of prompt")
def zigzagkv(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    target: float = 0.9,
    layer_floor: float = 0.5,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Set each layer's budget by the number of entries with most of its attention."""
    base_evictor = scored_by_name("zigzagkv", base, budget, skip_layers, every)
    return Plan(evict=ZigZagKV(base=base_evictor, target=target, floor=layer_floor))
