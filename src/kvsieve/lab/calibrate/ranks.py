"""ASL's first layer and threshold for a model, from the variance of ranks over its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve.lab.calibrate.reading import read
from kvsieve.methods import AdaptiveTSP, SnapKV
from kvsieve.planning.plans import Plan


def observed_layers(num_layers: int) -> int:
    """Return L_obs: the paper's 8, or half the depth of a shallow model."""
    return max(2, min(8, num_layers // 2))


def trace(model: Any, ids: Tensor, rate: Any, pooled: SnapKV, observed: int) -> list[float]:
    """Return V of every layer from ``observed - 1`` to the last but one, relative to the first of them."""
    # tau=0 never selects, so that all layers are seen.
    part = AdaptiveTSP(
        rate=rate,
        tau=0.0,
        observed=observed,
        first=observed - 1,
        window=pooled.window,
        kernel=pooled.kernel,
        pooling=pooled.pooling,
    )
    _, cache = read(model, Plan(propagate=part), ids)
    return cache.turn.record.report["relative_variance"][0]


@dataclass(frozen=True)
class Recommendation:
    """ASL's parameters for a model.

    Attributes:
        first: L_min.
        tau: threshold.
        layers: the layer that each prompt would select, None for never.
        adapts: whether it depends on the prompt; else every prompt selects at `first`.
    """

    first: int
    tau: float
    layers: list[int | None]
    adapts: bool


def recommend(traces: Sequence[Sequence[float]], start: int, layer: int) -> Recommendation:
    """Return (first, tau) such that no prompt selects before `layer` and as many as possible do at or after it.

    traces: one per prompt, V of the layers from `start`. Each first layer before `layer` gets the largest tau (cut to
    three digits) that no relative variance before `layer` falls below. The best pair has the most prompts that select,
    then the earliest on average, then the lowest first. If no prompt would ever select, first is `layer` and tau is
    1.01: every prompt selects there, as under FastKV.
    """
    best: tuple[tuple[float, ...], Recommendation] | None = None
    layer = max(layer, start)
    for first in range(start, layer):
        relative = [[_ratio(value, values[first - start]) for value in values[first - start :]] for values in traces]
        tau = math.floor(1000 * min(min(values[: layer - first]) for values in relative)) / 1000
        layers = [next((first + i for i, v in enumerate(values) if v < tau), None) for values in relative]
        chosen = [place for place in layers if place is not None]
        if tau > 0 and chosen:
            order = (-len(chosen), sum(chosen) / len(chosen), first)
            if best is None or order < best[0]:
                best = order, Recommendation(first, tau, layers, True)
    return best[1] if best else Recommendation(layer, 1.01, [layer for _ in traces], False)


def _ratio(value: float, base: float) -> float:
    # A first layer without variance cannot serve as reference: 0 rules it out.
    return value / base if base and math.isfinite(base) else 0.0
