"""PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling (arXiv 2406.02069).

Attention narrows with depth, so budgets fall linearly from the first layer to the last, which gets 1 / beta of the
average. Each layer keeps its base's choice, SnapKV's by default; windows and sinks are added to the pyramid, the same
in every layer. For a prompt shorter than twice the budget all layers get the same.

``paper=True`` is the setting of the paper's runs: window 8, kernel 7, max pooling; the defaults are those of its code's
class, window 32, kernel 5, average pooling.

Differences from the reference: steps from layer to layer are not floored, so that the total is exactly the budget's
(the original exceeds it by at most half an entry per layer and step); one set per KV head; every prompt, also a later
turn's, has its own pyramid; no layer keeps less than its base needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.core.allocation import allocate, pyramid
from kvsieve.core.scoring import Kernel, Pool
from kvsieve.methods.allocators import LayerAllocator
from kvsieve.methods.base import ScoredEvictor, check_int
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method


@dataclass(frozen=True, kw_only=True)
class PyramidKV(LayerAllocator, heads="own", query_aware=False):
    """Give early layers more of the budget than late ones: ``PyramidKV(base=SnapKV(budget=0.2))``.

    base: ranks entries and has the budget, the mean over layers. beta: ratio of the average to the last layer's share,
    at least 1; 1 is uniform.
    """

    base: ScoredEvictor = SnapKV(budget=Budget(ratio=0.2), kernel=5)
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "beta", self.beta, 1)

    def divide(self, layers: Sequence[int], length: int, count: int, floor: int) -> list[int]:
        return pyramid_shares(length, count, floor, self.spare, len(layers), self.beta)


def pyramid_shares(length: int, count: int, floor: int, spare: int, layers: int, beta: int) -> list[int]:
    """Return the entries of each layer, including `spare` outside of the pyramid; see LayerAllocator.divide."""
    line = pyramid(length, spare, count - spare, layers, beta)
    bounds = [max(floor - spare, 0)] * layers, [max(length, count) - spare] * layers
    return [spare + share for share in allocate(line, (count - spare) * layers, *bounds)]


@register_method(
    "pyramidkv", title="PyramidKV", paper="arXiv 2406.02069", phase="end of prompt", derive=defaults.pooling
)
@dataclass(frozen=True, kw_only=True)
class PyramidKVParameters(Parameters):
    """SnapKV with budgets that fall from the first layer to the last."""

    budget: Budget | str | int | float = "20%"
    beta: int = 20
    window: int = 32
    kernel: Kernel = 5
    pooling: Pool = "avg"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        return Plan(evict=self.role(PyramidKV, base=self.role(SnapKV)))
