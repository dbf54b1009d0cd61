"""CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences (arXiv 2503.12491).

A layer's preference is H^(1/tau1) V^(1/tau2), with the entropy H (spread) of the last W queries' attention to the
context, and its variance V over the queries (shift), both summed over heads and entries. Layers share the total in
proportion to it, plus the window. Entries are ranked by their mean attention plus gamma times its variance, pooled.
Layers shrink as later ones come, so that the whole prompt is never stored.

Differences from the reference: the excess of short prompts and floors goes to the other layers by preference, so that
the total is met to the entry; the exponents, tuned per model and budget there (1.6 and 0.4 for Llama-3.1-8B at 1024),
are 1; during decode, `every` cuts each layer to its own size again; a prompt up to the budget is not evicted from.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Kernel, Pool, group_mean, pool, score_dtype, weights_of
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.allocators import Cascade, observed
from kvsieve.methods.base import ScoredEvictor
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.types import LayerContext

# Beyond these, weights and scores overflow.
_LEAST_TAU = 0.05
_MOST_GAMMA = 1e9


@dataclass
class _Statistics:
    """Statistics of the window's attention to the M entries before it.

    Mean and unbiased variance over queries, [B, Hq, M]; its entropy, and the variance, summed over heads and entries,
    [B].
    """

    mean: Tensor
    variance: Tensor
    entropy: Tensor
    spread: Tensor


def _statistics(ctx: LayerContext, window: int) -> _Statistics:
    key = ctx.layer_idx, window
    if ctx.shared.get("cake", (None,))[0] == key:
        return ctx.shared["cake"][1]
    query = ctx.query[:, :, -window:]
    before = ctx.keys.shape[2] - query.shape[2]
    real = torch.ones(1, 1, query.shape[2], 1, dtype=score_dtype(query.dtype), device=query.device)
    if ctx.valid is not None:
        real = ctx.valid[:, :1, before:, None].to(real.dtype)
    number = real.sum(2)
    entropy = real.new_zeros(query.shape[0])
    means = [real.new_zeros(*query.shape[:2], 0)]
    variances = [real.new_zeros(*query.shape[:2], 0)]
    start = 0
    for weights in weights_of(ctx, window):
        part = weights[..., : max(before - start, 0)]
        start += weights.shape[-1]
        means.append(part.sum(2) / number.clamp_min(1))
        variances.append((((part - means[-1][:, :, None]) * real) ** 2).sum(2) / (number - 1).clamp_min(1))
        entropy -= (part * (part + 1e-10).log()).sum((1, 2, 3))
    variance = torch.cat(variances, -1)
    out = _Statistics(torch.cat(means, -1), variance, entropy, variance.sum((1, 2)))
    ctx.shared["cake"] = key, out
    return out


@dataclass(frozen=True, kw_only=True)
class CakeScores(SnapKV, heads="own", query_aware=True):
    """Rank entries by the mean of the window's attention plus `gamma` times its variance over the window's queries.

    gamma: in [0, 1e9]. The rest as in SnapKV.
    """

    kernel: Kernel = 5
    gamma: float = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gamma <= _MOST_GAMMA:
            raise PlanError(f"CakeScores: gamma must lie in [0, {_MOST_GAMMA:g}], got {self.gamma!r}")

    def context_scores(self, ctx: LayerContext) -> Tensor:
        found = _statistics(ctx, self.window)
        scores = found.mean + self.gamma * found.variance
        scores = pool(scores, self.width(ctx), self.pooling, ctx.valid)
        return scores if self.per_query_head else group_mean(scores, ctx.keys.shape[1])


@dataclass(frozen=True, kw_only=True)
class CAKE(Cascade, heads="all", query_aware=True):
    """Divide the budget among layers by the spread and the shift of their attention: ``CAKE()``.

    base: ranks entries and has the budget, the mean over layers; its window, or the last 32 queries, weigh layers.
    tau1, tau2: of entropy and variance, at least 0.05; larger ones make layers more equal.
    """

    base: ScoredEvictor = CakeScores(budget=Budget(ratio=0.2))
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau1", "tau2"):
            if not getattr(self, name) >= _LEAST_TAU:
                raise PlanError(f"CAKE: {name} must be at least {_LEAST_TAU}, got {getattr(self, name)!r}")

    @property
    def window(self) -> int:
        return observed(self.base)

    def weigh(self, ctx: LayerContext) -> list[float]:
        found = _statistics(ctx, self.window)
        # Means over ranks of sums over heads: the same fraction of the sums over all heads in every layer.
        pairs = ctx.ranks.mean(torch.stack([found.entropy, found.spread], 1)).tolist()
        return [max(entropy, 0.0) ** (1 / self.tau1) * spread ** (1 / self.tau2) for entropy, spread in pairs]


@register_method("cake", title="CAKE", paper="arXiv 2503.12491", phase="end of prompt", derive=defaults.pooling)
@dataclass(frozen=True, kw_only=True)
class CakeParameters(Parameters):
    """Set each layer's budget by the spread and the shift of its attention, evicting during prefill."""

    budget: Budget | str | int | float = "20%"
    tau1: float = 1.0
    tau2: float = 1.0
    gamma: float = 200.0
    window: int = 32
    kernel: Kernel = 5
    pooling: Pool = "avg"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        return Plan(evict=self.role(CAKE, base=self.role(CakeScores)))
