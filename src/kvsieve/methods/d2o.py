"""D2O: Dynamic Discriminative Operations for Efficient Generative Inference of Large Language Models (2406.13035).

Layers: F is the variance over the entries of the attention mass they receive from the prompt, scaled to [0, 1] over the
query heads of a layer and averaged; layers share the budget in proportion to exp(-F). Tokens: recent entries and heavy
hitters stay, as in H2O, and the first 4.

Merging: u is the largest cosine of a dropped key with a kept one. The layer's threshold is the mean of u, then at every
later eviction ``alpha threshold + beta mean(u)``. Dropped entries with u at the threshold or above join their most
similar kept entry, whose key and value become (own + sum of u_i e_i) / (1 + n); the others are lost.

Differences from the reference (the public code): the threshold is compared with each entry's own u, there with the mean
over the heads' entries of the same rank; recent entries are as many in every layer; entries of a KV head are ranked by
the group's mean; the first 4 entries absorb nothing; every layer takes part, there all but 0, 1 and the last
(``skip_layers=(0, 1, -1)``), and layers share the whole budget; it acts at the end of the prompt, there after the first
generated token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsieve.core.merging import Parted, nearest
from kvsieve.core.scoring import group_mean
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.allocators import Cascade
from kvsieve.methods.base import ScoredEvictor, check_int, check_share, last_real, positions, skips
from kvsieve.methods.h2o import add_mass, mass_now, query_head_mass
from kvsieve.methods.merged import Merge, Merged, averaged, merge_rule
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(ScoredEvictor, heads="own", query_aware=True):
    """Rank by the attention received so far; recent entries and sinks stay.

    recent: share of the budget for the most recent entries, in [0, 1]. sinks: first tokens that always stay.
    """

    recent: float = 0.5
    sinks: int = 4

    def __post_init__(self) -> None:
        check_share(self, "recent", self.recent)
        check_int(self, "sinks", self.sinks, 0)
        super().__post_init__()

    @property
    def minimum(self) -> int:
        return self.sinks + 2

    @property
    def why_minimum(self) -> str:
        return f"the {self.sinks} sinks, a recent entry and a heavy hitter"

    def observe(self, ctx: LayerContext) -> None:
        if skips(self.skip_layers, ctx):
            return
        add_mass(ctx, query_head_mass(ctx))
        if ctx.step.phase == "prefill":
            # The part of the prompt's budget, in the answer too.
            counts = [self.entries(length) for length in ctx.step.lengths]
            recent = [min(int(count * self.recent), max(count - self.sinks, 0)) for count in counts]
            ctx.state["recent_entries"] = torch.tensor(recent)

    def scores(self, ctx: LayerContext) -> Tensor:
        if "mass" not in ctx.state:
            self.observe(ctx)
        fixed = last_real(ctx, tuple(ctx.state["recent_entries"].tolist())) | (positions(ctx) < self.sinks)
        return group_mean(mass_now(ctx), ctx.keys.shape[1]).masked_fill(fixed, float("inf"))


@dataclass(frozen=True, kw_only=True)
class SpreadLayers(Cascade, heads="all", query_aware=True):
    """Give more entries to layers with evenly spread attention: ``SpreadLayers(base=HeavyHitters(budget=0.2))``."""

    defer_until_last_layer: ClassVar[bool] = True

    base: ScoredEvictor = HeavyHitters(budget=Budget(ratio=0.2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.base, HeavyHitters):
            raise PlanError(f"SpreadLayers: base must be HeavyHitters, got {self.base!r}")

    @property
    def spare(self) -> int:
        return 0

    def weigh(self, ctx: LayerContext) -> list[float]:
        mass = mass_now(ctx)
        real = torch.ones_like(mass)
        if ctx.valid is not None:
            real = ctx.valid.repeat_interleave(mass.shape[1] // ctx.valid.shape[1], 1).to(mass.dtype)
        count = real.sum(-1)
        mean = (mass * real).sum(-1) / count.clamp_min(1)
        spread = (((mass - mean[..., None]) * real) ** 2).sum(-1) / (count - 1).clamp_min(1)
        spread = ctx.ranks.gather(spread[..., None])[..., 0]
        low, high = (edge[:, None] for edge in torch.aminmax(spread, dim=1))
        return (-((spread - low) / (high - low + 1e-6)).mean(1)).exp().tolist()


@merge_rule("d2o")
@dataclass(frozen=True, kw_only=True)
class D2O(Merged, heads="all", query_aware=False):
    """Merge dropped entries that are similar enough to a kept one, by D2O's rule: ``D2O(base=SnapKV(budget=0.2))``.

    alpha, beta: of the threshold, ``alpha threshold + beta mean``, at least 0.
    """

    alpha: float = 0.5
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not value >= 0:
                raise PlanError(f"D2O: {name} must be at least 0, got {value!r}")

    def merge(self, ctx: LayerContext, parted: Parted) -> Merge:
        keys = parted.keys(ctx)
        alike, place = nearest(keys[1], keys[0], parted.open)
        merging = parted.merging & ~alike.isneginf()
        joins = merging & (alike >= self._threshold(ctx, alike, merging)[:, :, None])
        ones = torch.ones_like(keys[0][..., 0])
        weights = ones, alike.masked_fill(~joins, 0)
        count = joins.to(ones.dtype)
        return Merge(averaged(keys, weights, place, count), averaged(parted.values(ctx), weights, place, count))

    def _threshold(self, ctx: LayerContext, alike: Tensor, merging: Tensor) -> Tensor:
        """Return the threshold [B, 1] of this eviction, and remember it; rows that drop nothing keep theirs."""
        sums = torch.stack([alike.masked_fill(~merging, 0).sum((1, 2)), merging.sum((1, 2)).to(alike.dtype)])
        total, number = ctx.ranks.mean(sums)
        mean = total / number.clamp_min(1e-9)
        before = ctx.state.get("threshold")
        if before is not None:
            before = before.to(mean.device)
            mean = (self.alpha * before + self.beta * mean).where(~before.isnan(), mean)
        old = torch.full_like(mean, float("nan")) if before is None else before
        ctx.state["threshold"] = mean.where(number > 0, old)
        return mean[:, None]


@register_method("d2o", title="D2O", paper="arXiv 2406.13035", phase="end of prompt, decode")
@dataclass(frozen=True, kw_only=True)
class D2OParameters(Parameters):
    """Keep heavy hitters, more in layers with even attention, and merge similar dropped entries into them."""

    budget: Budget | str | int | float = "20%"
    recent: float = 0.5
    sinks: int = 4
    alpha: float = 0.5
    beta: float = 0.5
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = 1

    def plan(self) -> Plan:
        return Plan(evict=self.role(D2O, base=SpreadLayers(base=self.role(HeavyHitters))))
