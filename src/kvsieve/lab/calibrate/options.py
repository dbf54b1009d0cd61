"""Options of a calibration: the parts to measure, and the settings to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.scoring import Kernel
from kvsieve.errors import PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.suggestions import did_you_mean

# Answers of the model itself end here: a pass key of 64 digits fits. Heads are measured on its beginning only, since
# small models continue beyond it.
ANSWER = 80
BEGINNING = 32
DEFAULT_PARTS = ("pooling", "answers", "tsp", "asl", "heads", "q_filters")
PARTS = (*DEFAULT_PARTS, "anchors", "q_centres", "head_budgets", "entropies")
RULES = ("settled", "argmin")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a calibration.

    Attributes:
        parts: which of PARTS.
        budget: entries kept where pooling is compared.
        tsp_rate: tokens propagated under FastKV and ASL.
        rule: how the TSP layer is chosen, "settled" or "argmin"; see `distances.choose_layer`.
        tolerance: the rule's; None for 0.05 under "settled" and 0 under "argmin".
        max_layer: deepest TSP layer to try; None for the last but one.
        every_layer: False to measure from the deepest layer down to the first that is not near; same choice under
            "settled".
        kernels: SnapKV's kernels to compare.
        windows: SnapKV's windows to compare.
        poolings: SnapKV's poolings to compare.
        budgets: budgets to test answers at, smallest first.
    """

    parts: tuple[str, ...] = DEFAULT_PARTS
    budget: Budget | str | int | float = "20%"
    tsp_rate: Budget | str | int | float = "20%"
    rule: str = "settled"
    tolerance: float | None = None
    max_layer: int | None = None
    every_layer: bool = True
    kernels: tuple[Kernel, ...] = (7, 13, 21, 31, 63, 95, "auto")
    windows: tuple[int, ...] = (16, 32, 64)
    poolings: tuple[str, ...] = ("avg", "max")
    budgets: tuple[str, ...] = ("5%", "10%", "20%", "35%", "50%")

    @classmethod
    def quick(cls, **how: Any) -> Options:
        """Return options with a quarter of the settings, skipping layers that cannot be chosen (most of the time)."""
        return cls(
            kernels=(21, 63, "auto"), windows=(16, 32), every_layer=how.get("rule", "settled") != "settled", **how
        )

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise PlanError(f"unknown part {part!r} of a calibration{did_you_mean(part, list(PARTS))}")
        if not self.parts:
            raise PlanError(f"no part to calibrate was named; give some of {', '.join(PARTS)}")
        if self.rule not in RULES:
            raise PlanError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if not self.every_layer and self.rule != "settled":
            raise PlanError(f"the rule {self.rule!r} compares all layers; leave every_layer=True, or take settled")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise PlanError(f"tolerance must be at least 0, got {self.tolerance!r}")
        if self.max_layer is not None and self.max_layer < 0:
            raise PlanError(f"max_layer must be a layer's index, at least 0, got {self.max_layer!r}")
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        object.__setattr__(self, "tsp_rate", Budget.parse(self.tsp_rate, "tsp_rate"))
        for name in ("budget", "tsp_rate"):
            vars(self)[name].refuse_bytes("calibrate", name, "prompts of several lengths are compared")
