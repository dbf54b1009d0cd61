"""Staged propagation: CLAA that drops tokens in two steps.

This is ours, not a paper's method. It ranks like CLAA (arXiv 2602.16054), by the largest of several layers' scores.
Dropping tokens gradually is also the idea of PyramidInfer (arXiv 2405.12532), in every layer, and SPTS (arXiv
2601.13155), in stages of layers with skipped tokens that come back.

An early layer ranks tokens badly, but it can identify half of a long prompt as irrelevant; a deeper layer then keeps
few of the rest. So the layers between the two compute half of the prompt, and the deep layer may be that of a
calibrated FastKV.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Kernel, Pool
from kvsieve.errors import PlanError
from kvsieve.methods.base import check_int
from kvsieve.methods.claa import CrossLayerTSP
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method


@dataclass(frozen=True, kw_only=True)
class StagedTSP(CrossLayerTSP, heads="all", query_aware=True):
    """Propagation in two steps: the share `early_rate` after layer `early`, the share `rate` after `layer`.

    If both are the same layer, or the same layer with attention to all tokens follows both, only `rate` counts. early:
    None for half of `layer`. early_rate: a Budget, a share or a number of the turn's prompt, like `rate`. The rest as
    CrossLayerTSP's.
    """

    early: int | None = None
    early_rate: Budget = Budget(ratio=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "early_rate", Budget.parse(self.early_rate, "early_rate"))
        self.early_rate.refuse_bytes("StagedTSP", "early_rate", "it counts tokens that go on to deeper layers")
        if self.early is not None:
            check_int(self, "early", self.early, 0)

    def source(self, num_layers: int) -> int:
        last = super().source(num_layers)
        early = last // 2 if self.early is None else self.early
        if early > last:
            raise PlanError(
                f"the first step, after layer {early}, must not come behind the second, after layer {last}; set a "
                "smaller early_layer= or a larger tsp_layer="
            )
        return early

    def first_layer(self, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        self.layer_from(super().source(num_layers), num_layers, layers)
        return super().first_layer(num_layers, layers)

    def caution(self, num_layers: int) -> str | None:
        return CrossLayerTSP(rate=self.rate, layer=self.layer).caution(num_layers)

    def drops(self, num_layers: int) -> tuple[tuple[int, Budget], ...]:
        return (self.source(num_layers), self.early_rate), (super().source(num_layers), self.rate)


@register_method(
    "staged", title="Staged propagation", paper="none", phase="prefill, end of prompt", derive=defaults.fastkv
)
@dataclass(frozen=True, kw_only=True)
class StagedParameters(Parameters):
    """CLAA in two steps: drop half of the tokens early, and most of the rest at FastKV's layer."""

    budget: Budget | str | int | float = "10%"
    tsp_layer: int | None = None
    tsp_rate: Budget | str | int | float = 0.2
    early_layer: int | None = None
    early_rate: Budget | str | int | float = 0.5
    joined: int = 4
    window: int = 8
    kernel: Kernel = 7
    pooling: Pool = "max"

    def plan(self) -> Plan:
        propagate = self.role(StagedTSP, rate=self.tsp_rate, layer=self.tsp_layer, early=self.early_layer)
        return Plan(propagate=propagate, evict=self.role(SnapKV))
