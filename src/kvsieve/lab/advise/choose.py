"""Limits, and the choice of a plan among the measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsieve.errors import InputError

if TYPE_CHECKING:
    from kvsieve.lab.eval.cells import MethodSetting

# Default without limits.
USUAL_LOSS = 0.02


@dataclass(frozen=True)
class PlanLimits:
    """Limits of a plan; with none set, a loss of at most 0.02.

    Attributes:
        memory: bytes of one prompt's KV cache at the given context.
        tpot: seconds per token after the first.
        loss: nats per token of the answer, mean KL divergence from full KV.
    """

    memory: int | None = None
    tpot: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"--{name} must be more than 0, got {value:g}")
        if self.memory is None and self.tpot is None and self.loss is None:
            object.__setattr__(self, "loss", USUAL_LOSS)

    @property
    def by_memory(self) -> bool:
        """True to prefer the least memory among plans within the limit on loss."""
        return self.loss is not None

    def describe(self) -> list[str]:
        out = [] if self.memory is None else [f"KV of at most {size(self.memory)}"]
        out += [] if self.tpot is None else [f"at most {1000 * self.tpot:g} ms per token"]
        return out + ([] if self.loss is None else [f"a loss of at most {self.loss:g} nats"])


@dataclass(frozen=True)
class Candidate:
    """A plan and its measurements.

    Attributes:
        setting: the method, its parameters and its plan.
        kv_bytes: of one prompt at the given context, computed from the entries kept at the measured length.
        loss: mean KL to full KV over the prompts used to choose, nats per token of the answer.
        top1: share of these tokens at which both have the same top token.
        score: mean score of its answers.
        tpot: median seconds per token after the first, at the measured length; None if not measured.
        tpot_ratio: to full KV's in the same run.
        ttft_ratio: time to first token, to full KV's.
        lost: long answers of full KV that this plan fails, by task: (lost, given by full KV).
        acted: False if a prompt fitted the budget, so that the plan was not measured.
    """

    setting: MethodSetting
    kv_bytes: int
    loss: float
    top1: float
    score: float
    tpot: float | None = None
    tpot_ratio: float | None = None
    ttft_ratio: float | None = None
    lost: dict[str, tuple[int, int]] = field(default_factory=dict)
    acted: bool = True

    @property
    def loses(self) -> bool:
        return any(lost for lost, _ in self.lost.values())

    @property
    def name(self) -> str:
        return f"{self.setting.label} {self.setting.budget or ''}".strip()

    def described(self) -> dict[str, Any]:
        shown = {name: value for name, value in vars(self).items() if name != "setting"}
        return {**self.setting.described(), "plan": plan_line(self.setting), **shown}


def misses(one: Candidate, limits: PlanLimits, loss: float | None = None) -> dict[str, float]:
    """Return the limits that a plan exceeds, with the factor of each. loss: replaces the candidate's own."""
    found = {"memory": (one.kv_bytes, limits.memory), "loss": (one.loss if loss is None else loss, limits.loss)}
    if limits.tpot is not None and one.tpot is not None:
        found["tpot"] = (one.tpot, limits.tpot)
    return {name: value / limit for name, (value, limit) in found.items() if limit is not None and value > limit}


def ranked(candidates: Sequence[Candidate], limits: PlanLimits) -> list[Candidate]:
    """Return the plans that acted and are within all limits, the best first.

    The best has the least memory if the loss is limited, else the least loss; plans that lose long answers of full KV
    come last.
    """
    fine = [candidate for candidate in candidates if candidate.acted and not misses(candidate, limits)]

    def order(one: Candidate) -> tuple[Any, ...]:
        time = one.tpot_ratio or 1.0
        return (one.kv_bytes, one.loss, time) if limits.by_memory else (one.loss, one.kv_bytes, time)

    return sorted(fine, key=lambda one: (one.loses, *order(one)))


def nearest(candidates: Sequence[Candidate], limits: PlanLimits) -> tuple[Candidate, dict[str, float]]:
    """Return the plan that acted and exceeds its limits by the least factor, and the limits it exceeds."""
    acted = [candidate for candidate in candidates if candidate.acted]
    best = min(acted, key=lambda one: (max(misses(one, limits).values(), default=0.0), one.loss))
    return best, misses(best, limits)


def on_frontier(one: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Return whether no other plan is at least as good in loss, memory and time, and better in one of them."""
    costs = _costs(one)
    rest = [_costs(candidate) for candidate in candidates if candidate is not one and candidate.acted]
    return one.acted and not any(
        all(a <= b for a, b in zip(other, costs, strict=True)) and other != costs for other in rest
    )


def plan_line(setting: MethodSetting) -> str:
    """Return the Python call that makes the plan."""
    parameters = {**setting.given, **({} if setting.budget is None else {"budget": setting.given.get("budget")})}
    shown = "".join(f", {name}={value!r}" for name, value in parameters.items() if value is not None)
    return f"kvsieve.plan({setting.method!r}{shown})"


def size(count: float) -> str:
    for unit, bytes_per in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= bytes_per:
            return f"{count / bytes_per:.2f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def _costs(one: Candidate) -> tuple[float, ...]:
    return (one.loss, float(one.kv_bytes), one.tpot_ratio or 1.0)
