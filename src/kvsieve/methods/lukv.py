"""LU-KV: budgets of all heads by the future utility of their entries (arXiv 2602.08585).

"Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction". An entry's utility
is the largest attention that the answer's tokens pay it, times the norm of its projected value, as a share of its
layer's. Ranked by a scorer, a head's entries lose utility as the lowest ranks go; the lower convex hull of this loss
has a price for every rank. Offline, the cheapest ranks of all heads are dropped for each budget of 1% to 99%, and the
shares that heads keep are averaged over prompts. Online, a head keeps its share of the prompt: the first `sinks` and
the last `recent` entries, then its best by Expected Attention with `epsilon` added to the attention.

Differences from the reference: shares come from a profile (`kvsieve calibrate --parts head_budgets`), without one the
plan is refused; between two percents they are interpolated; they are scaled so that the total over all layers is met
to the entry, with at least sinks and recent entries in each head, where the reference rounds each layer by itself;
`every=n` cuts each head to its own size again during decode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsieve.core.allocation import allocate
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.methods.allocators import HeadAllocator
from kvsieve.methods.arrays import check_heads, set_numbers
from kvsieve.methods.base import ScoredEvictor, check_int, last_real
from kvsieve.methods.expected_attention import ExpectedAttention
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Filters, Profile, array_of
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class FlooredAttention(ExpectedAttention, heads="own", query_aware=False):
    """Expected Attention plus `epsilon`, times the values' norms; the last `recent` entries stay.

    epsilon: at least 0. recent: at least 0.
    """

    stays = ("sinks", "recent")

    epsilon: float = 0.02
    recent: int = 1

    def __post_init__(self) -> None:
        check_int(self, "recent", self.recent, 0)
        if not 0 <= self.epsilon < float("inf"):
            raise PlanError(f"{type(self).__name__}: epsilon must be a number of at least 0, got {self.epsilon!r}")
        super().__post_init__()

    def scores(self, ctx: LayerContext) -> Tensor:
        scores = super().scores(ctx)
        if self.use_vnorm:
            # Without the norms, epsilon moves all entries alike.
            scores = scores + self.epsilon * ctx.values.to(score_dtype(ctx.values.dtype)).norm(dim=-1)
        return scores.masked_fill(last_real(ctx, self.recent), float("inf"))


SCORER = FlooredAttention(budget=Budget(ratio=0.2))
"""The scorer that a calibration measures shares for."""


@dataclass(frozen=True, kw_only=True)
class LUKV(HeadAllocator, heads="own", ragged=True, query_aware=False):
    """Divide the budget among the heads of all layers by measured shares: ``LUKV(shares=shares)``.

    base: ranks entries and has the budget, the mean over heads and layers; the shares must be measured with its scores.
    shares: [layers][KV heads][n], the part of its entries that a head keeps at budgets of 1 / (n + 1) ... n / (n + 1).
    """

    shares: Filters = field(repr=False)
    base: ScoredEvictor = SCORER

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "shares", "[layers][KV heads][budgets]")
        wrong = [share for layer in self.shares for head in layer for share in head if not 0 <= share <= 1]
        if wrong:
            raise PlanError(f"LUKV: shares must be from 0 to 1, got {wrong[0]!r}")

    def check_heads(self, layers: int, heads: int) -> None:
        how = " with `kvsieve calibrate --parts head_budgets`"
        check_heads(self, "shares", self.shares, layers, heads, how=how)

    def head_counts(self, layers: Sequence[int], length: int, count: int) -> list[list[int]]:
        shares = [_at(head, count / length) for layer in layers for head in self.shares[layer]]
        room = [max(length, count)] * len(shares)
        counts = iter(allocate(shares, count * len(shares), [self.spare] * len(shares), room))
        return [[next(counts) for _ in self.shares[layer]] for layer in layers]


def _at(shares: Sequence[float], budget: float) -> float:
    """Return a head's share at a budget in [0, 1], between the two that are nearest."""
    points = (0.0, *shares, 1.0)
    place = budget * (len(points) - 1)
    before = min(int(place), len(points) - 2)
    return points[before] + (place - before) * (points[before + 1] - points[before])


@register_method("lukv", title="LU-KV", paper="arXiv 2602.08585", phase="end of prompt", part="head_budgets")
def lukv(
    budget: Budget | str | int | float = "20%",
    profile: Profile | str | os.PathLike[str] | None = None,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Expected Attention with one budget for the heads of all layers, shared as calibrated; needs a model's profile."""
    shares, model = array_of("head_budgets", "lukv", profile)
    base = FlooredAttention(budget=Budget.parse(budget), skip_layers=skip_layers, every=every)  # type: ignore[arg-type]
    return Plan(evict=LUKV(base=base, shares=shares), profile=model)
