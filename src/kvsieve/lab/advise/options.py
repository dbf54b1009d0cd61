"""Options of an advice: its context and limits, and the extent of measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.errors import InputError
from kvsieve.lab.advise.choose import PlanLimits

METHODS = ("snapkv", "adakv", "fastkv", "asl", "lagkv", "rocketkv", "rocketkv-mt", "streamingllm")
BUDGETS = ("10%", "25%", "50%")


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """Options of an advice.

    Attributes:
        context: tokens of the prompts that the advice is for.
        limits: on the plan.
        methods: names and given parameters.
        codecs: as text, None for none; each method is measured with each.
        rests: of evicted entries, likewise.
        prefills: sparse prefill methods, likewise.
        budgets: of each method; () for a few shares or, with a limit on memory, those that fit.
        samples: prompts per task and part: one part to choose by, one to state the loss by.
        measure_at: tokens of the measured prompts; None for the longest with a bearable time.
        question: "visible" if plans see the question, "hidden" if they act on the context alone.
        cost_samples: repetitions of time measurements; 0 skips them.
        seed: of generated prompts.
    """

    context: int
    limits: PlanLimits = field(default_factory=PlanLimits)
    methods: tuple[tuple[str, Mapping[str, Any]], ...] = tuple((name, {}) for name in METHODS)
    codecs: tuple[str | None, ...] = (None,)
    rests: tuple[str | None, ...] = (None,)
    prefills: tuple[str | None, ...] = (None,)
    budgets: tuple[str, ...] = ()
    samples: int = 3
    measure_at: int | None = None
    question: str = "visible"
    cost_samples: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("context", self.context, 1),
            ("samples", self.samples, 2),
            ("cost_samples", self.cost_samples, 0),
            ("measure_at", 1 if self.measure_at is None else self.measure_at, 1),
        ):
            if value < least:
                raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.question not in ("visible", "hidden"):
            raise InputError(f"--question must be visible or hidden, got {self.question!r}")
        if self.limits.tpot is not None and not self.cost_samples:
            raise InputError("a limit on the time per token needs it measured; let --cost-samples be at least 1")
        if not self.methods:
            raise InputError("no method to measure was named; give --methods, for example snapkv,adakv")

    def check(self, longest: int | None) -> None:
        """Raise InputError if prompts exceed the model's context of `longest` tokens."""
        for name, value in (("context", self.context), ("measure-at", self.measure_at)):
            if longest is not None and value is not None and value > longest:
                raise InputError(f"--{name} of {value} tokens is beyond the model's context of {longest}; lower it")
        if self.measure_at is not None and self.measure_at > self.context:
            raise InputError(f"--measure-at {self.measure_at} is more than --context {self.context}; lower it")
