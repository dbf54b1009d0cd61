"""DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs (arXiv 2412.14838).

A new layer first keeps up to `most` times the budget, its best by pooled window attention. After every `interval`
layers, and after the last one, the best entries of all layers so far are determined, up to the sum of their budgets;
each layer is cut to its part of them.

Differences from the reference: parts are rounded so that the total is met to the entry; no layer keeps less than its
base needs; a layer that was cut cannot grow again, as in the reference, and its further share goes to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsieve.core.allocation import allocate
from kvsieve.core.scoring import Kernel, Pool
from kvsieve.core.selection import top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import torch
from kvsieve.methods.allocators import Cascade, LayerScores
from kvsieve.methods.base import ScoredEvictor, check_int
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class DynamicKV(Cascade, heads="all", query_aware=True):
    """Divide the budget among layers by their numbers of best entries: ``DynamicKV(base=SnapKV(budget=0.2))``.

    base: ranks entries and has the budget, the mean over layers; its scores should be comparable between layers, as
    attention is. most: most times the budget that a layer may keep, at least 1, without the window. interval: layers
    between two comparisons.
    """

    compares: ClassVar[bool] = True

    base: ScoredEvictor = SnapKV(budget=Budget(ratio=0.2), window=8)
    most: float = 5.0
    interval: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.most >= 1:
            raise PlanError(f"DynamicKV: most must be at least 1, got {self.most!r}")
        check_int(self, "interval", self.interval, 1)

    def weigh(self, ctx: LayerContext) -> list[float]:
        return [0.0] * len(ctx.stored)

    def weights(self, seen: Sequence[LayerScores], row: int) -> list[float]:
        """Count, per layer, its share of the best entries of all layers so far."""
        lines = []
        budget = 0
        for layer in seen:
            scores = layer.scores[row]
            top = top_mask(scores[None], (self._most(layer, row),))[0]
            must = scores >= torch.finfo(scores.dtype).max
            lines.append(scores.masked_fill(must | ~top, float("-inf")).flatten())
            budget += scores.shape[0] * max(layer.counts[row] - self.spare, 0)
        scores = torch.cat(lines)
        best = top_mask(scores[None], (budget,))[0] & ~scores.isneginf()
        wins = torch.stack([part.sum() for part in best.split([len(line) for line in lines])])
        return [float(won) for won in wins.tolist()]

    def targets(self, seen: Sequence[LayerScores], row: int, ahead: int, *, last: bool) -> list[int]:
        most = [self._most(layer, row) for layer in seen]
        if not last and len(seen) % self.interval:
            return most
        least = [min(layer.stored[row], self.spare) for layer in seen]
        total = sum(layer.counts[row] for layer in seen) - sum(least)
        bounds = self._less(least, [layer.floors[row] for layer in seen]), self._less(least, most)
        parts = allocate(self.weights(seen, row), total, *bounds)
        return [count + part for count, part in zip(least, parts, strict=True)]

    def _most(self, layer: LayerScores, row: int) -> int:
        count = layer.counts[row]
        most = self.spare + int(self.most * (count - self.spare))
        return min(layer.stored[row], max(layer.floors[row], most))


@register_method(
    "dynamickv", title="DynamicKV", paper="arXiv 2412.14838", phase="end of prompt", derive=defaults.pooling
)
@dataclass(frozen=True, kw_only=True)
class DynamicKVParameters(Parameters):
    """Set each layer's budget by its share of the best entries of all layers."""

    budget: Budget | str | int | float = "20%"
    most: float = 5.0
    interval: int = 4
    window: int = 8
    kernel: Kernel = 7
    pooling: Pool = "avg"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        return Plan(evict=self.role(DynamicKV, base=self.role(SnapKV)))
