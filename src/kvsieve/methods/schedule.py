"""Budgets per layer given by the user, without a paper: for results of a search, and for experiments.

Every layer gets its share of the total, and any method chooses the entries. Shares need not have a certain sum, so
numbers of entries are shares too. Layers at the method's minimum or at the prompt's length pass the difference to the
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.core.allocation import allocate
from kvsieve.errors import PlanError, short
from kvsieve.methods.allocators import LayerAllocator
from kvsieve.methods.base import ScoredEvictor, scored_by_name
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class PerLayer(LayerAllocator, heads="own", query_aware=False):
    """Divide the budget among layers by given shares: ``PerLayer(base=SnapKV(budget=0.2), shares=(2, 2, 1, 1))``.

    base: ranks entries and has the budget, the mean over layers. shares: a number per layer of the model, at least 0,
    or their text "2/2/1/1"; ignored for layers that do not evict. Raises PlanError for other values, and when attached
    to a model with another number of layers.
    """

    base: ScoredEvictor = SnapKV(budget=Budget(ratio=0.2))
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.shares.split("/") if isinstance(self.shares, str) else self.shares
        try:
            shares = tuple(float(share) for share in parts)
        except (TypeError, ValueError, OverflowError):
            shares = ()
        if not any(shares) or not all(0 <= share < math.inf for share in shares):
            raise PlanError(
                "PerLayer: shares must be a number of at least 0 for every layer, one of them above 0, such as "
                f"(2, 2, 1, 1) or '2/2/1/1'; got {short(self.shares)}"
            )
        object.__setattr__(self, "shares", shares)

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        if len(self.shares) != num_layers:
            raise PlanError(
                f"PerLayer has {len(self.shares)} shares and the model {num_layers} layers: give one for every layer"
            )

    def layer_counts(self, ctx: LayerContext, counts: tuple[int, ...]) -> tuple[int, ...]:
        self.check(ctx.num_layers)
        return super().layer_counts(ctx, counts)

    def divide(self, layers: Sequence[int], length: int, count: int, floor: int) -> list[int]:
        weights = [self.shares[layer] for layer in layers]
        return allocate(weights, count * len(layers), [floor] * len(layers), [max(length, count)] * len(layers))


@register_method("per-layer", title="Budgets per layer", paper="none", phase="end of prompt", example={"shares": "1"})
def per_layer(
    shares: tuple[float, ...] | str,
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Give each layer its own share of the budget of another method, `base`."""
    return Plan(evict=PerLayer(base=scored_by_name("per-layer", base, budget, skip_layers, every), shares=shares))  # type: ignore[arg-type]
