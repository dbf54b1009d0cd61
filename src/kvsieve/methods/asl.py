"""ASL: Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference (section 4, D.2, algorithms 1-2).

Like FastKV, but the layer after which only salient tokens go on is found per input. At every layer the tokens are
ranked by pooled window mass, summed over all heads. From layer L_min on, V is the variance of the ranks over the last
L_obs layers, averaged over the union of their top tokens; the first layer where V, relative to its value at L_min,
falls below tau is the selection layer. Its own top tokens and the window go on; if none falls below, all do.

Every layer keeps `budget` entries (group-shared SnapKV with the same window), so that deep layers hold what they saw;
`full_before=True` evicts nothing ("full before selection").

Differences from the reference: rows of a batch decide alone, and one that has selected waits with filler for the
others; variance zero at L_min selects where it stays zero; only L_obs rank vectors are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsieve.budget import Budget
from kvsieve.core.scoring import Pool, pooled_mass
from kvsieve.core.selection import pack
from kvsieve.errors import PlanError
from kvsieve.methods.base import check_choice, check_int
from kvsieve.methods.snapkv import SnapKV
from kvsieve.plans import Plan
from kvsieve.registry import register_method
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class AdaptiveTSP:
    """Token-selective propagation from the layer where ranks have settled.

    rate: tokens that go on, window included; a Budget, a share or a number of the turn's prompt. tau: relative variance
    below which a layer selects. observed: L_obs, layers whose ranks are compared. first: L_min, None for a third of
    the depth, at least ``observed - 1``. window, kernel, pooling: as SnapKV's.
    """

    rate: Budget
    tau: float = 0.3
    observed: int = 8
    first: int | None = None
    window: int = 32
    kernel: int = 7
    pooling: Pool = "avg"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", Budget.parse(self.rate))
        if not self.tau >= 0:
            raise PlanError(f"AdaptiveTSP: tau must be at least 0, got {self.tau!r}")
        check_int(self, "observed", self.observed, 2)
        check_int(self, "window", self.window, 1)
        check_int(self, "kernel", self.kernel, 1, odd=True)
        check_choice(self, "pooling", self.pooling, ("avg", "max"))
        if self.first is not None:
            check_int(self, "first", self.first, 0)
            if self.first < self.observed - 1:
                raise PlanError(f"AdaptiveTSP: first={self.first} must be at least observed - 1 = {self.observed - 1}")

    def source(self, num_layers: int) -> int:
        first = max(num_layers // 3, self.observed - 1) if self.first is None else self.first
        if first >= num_layers - 1:
            raise PlanError(
                f"ASL's first layer {first} is outside the model: it has {num_layers} layers, so it must lie in "
                f"{self.observed - 1}..{num_layers - 2}; set first= or a smaller observed="
            )
        return first

    def select(self, ctx: LayerContext) -> Selection | None:
        offered = ctx.offered_counts
        rows = ctx.shared.setdefault("asl", [_Row(n, min(n, self.rate.entries(n, self.window))) for n in offered])
        open_rows = [row for row in rows if row.layer is None and row.kept < row.length]
        if not open_rows or ctx.layer_idx == ctx.num_layers - 1:
            return None
        saliency = pooled_mass(ctx, self.window, self.kernel, self.pooling).mean(1)
        window = ctx.keys.shape[2] - saliency.shape[1]
        chosen: dict[int, Tensor] = {}
        for index, row in enumerate(rows):
            if row in open_rows:
                scores = saliency[index, saliency.shape[1] - (row.length - window) :]
                top = self._observe(row, scores, row.kept - window, ctx)
                if top is not None:
                    chosen[index] = top
        ctx.shared["report"] = _report(rows, self.tau)
        if not chosen:
            return None
        mask = torch.zeros(len(rows), ctx.offered, dtype=torch.bool, device=ctx.keys.device)
        for index, count in enumerate(offered):
            mask[index, ctx.offered - count :] = True
            if index in chosen:
                mask[index, ctx.offered - count : ctx.offered - window] = chosen[index]
        lengths = tuple(rows[i].kept if rows[i].layer is not None else n for i, n in enumerate(offered))
        return pack(mask, lengths)

    def _observe(self, row: _Row, scores: Tensor, top: int, ctx: LayerContext) -> Tensor | None:
        """Note a layer's ranks; the mask of the context tokens that go on, if this layer selects."""
        ranks = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        order = scores.argsort(descending=True, stable=True)
        ranks[order] = torch.arange(1.0, len(scores) + 1, device=scores.device)
        row.ranks = [*row.ranks, ranks][-self.observed :]
        if ctx.layer_idx < self.source(ctx.num_layers) or len(row.ranks) < self.observed:
            return None
        recent = torch.stack(row.ranks)
        variance = recent[:, (recent <= top).any(0)].double().var(0, correction=0).mean().item()
        row.base = variance if row.base is None else row.base
        relative = variance / row.base if row.base else (0.0 if variance == 0 else float("inf"))
        row.trace.append(relative)
        if relative >= self.tau:
            return None
        row.layer, row.ranks = ctx.layer_idx, []
        return ranks <= top


@dataclass(eq=False)
class _Row:
    """One sequence's bookkeeping: true tokens, tokens that will go on, ranks of the last layers, relative variances."""

    length: int
    kept: int
    ranks: list[Tensor] = field(default_factory=list)
    base: float | None = None
    trace: list[float] = field(default_factory=list)
    layer: int | None = None


def _report(rows: list[_Row], tau: float) -> dict[str, object]:
    report: dict[str, object] = {
        "selection_layer": [row.layer for row in rows],
        "relative_variance": [row.trace for row in rows],
    }
    if all(row.layer is None for row in rows):
        report["idle"] = f"every token went through all layers: the relative variance never fell below tau={tau}"
    return report


@register_method(
    "asl",
    title="ASL",
    paper="Taniguchi et al., Adaptive Layer Selection",
    phase="prefill, end of prompt",
    query_aware=True,
)
def asl(
    budget: Budget | str | int | float = 2048,
    tau: float = 0.3,
    observed: int = 8,
    first: int | None = None,
    window: int = 32,
    kernel: int = 7,
    pooling: Pool = "avg",
    full_before: bool = False,
) -> Plan:
    """FastKV whose layer is found per input, from the variance of token ranks."""
    check_choice(AdaptiveTSP, "full_before", full_before, (False, True))
    rate = Budget.parse(budget)
    return Plan(
        propagate=AdaptiveTSP(
            rate=rate, tau=tau, observed=observed, first=first, window=window, kernel=kernel, pooling=pooling
        ),
        evict=None if full_before else SnapKV(budget=rate, window=window, kernel=kernel, pooling=pooling),
    )
