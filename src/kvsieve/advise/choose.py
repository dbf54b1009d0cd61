"""Limits, and the choice of a plan among those that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsieve.errors import InputError

if TYPE_CHECKING:
    from kvsieve.eval.cells import MethodSetting

# Where nothing is asked for.
USUAL_LOSS = 0.02


@dataclass(frozen=True)
class PlanLimits:
    """Limits that a plan must keep to; with none, a loss of at most 0.02.

    Attributes:
        memory: bytes of the KV cache of one prompt at the context asked for.
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
        """True when the plan with the least memory is wanted, of those that keep to the loss."""
        return self.loss is not None

    def describe(self) -> list[str]:
        """Each limit in words."""
        out = [] if self.memory is None else [f"KV of at most {size(self.memory)}"]
        out += [] if self.tpot is None else [f"at most {1000 * self.tpot:g} ms per token"]
        return out + ([] if self.loss is None else [f"a loss of at most {self.loss:g} nats"])


@dataclass(frozen=True)
class Candidate:
    """One plan and what was measured of it.

    Attributes:
        setting: the method, its parameters and its plan.
        kv_bytes: of one prompt at the context asked for, computed from the entries kept at the measured length.
        loss: mean KL to full KV over the prompts it was chosen by, nats per token of the answer.
        top1: share of these tokens at which both put the same token first.
        score: mean score of its answers.
        tpot: median seconds per token after the first, at the measured length; None where not measured.
        tpot_ratio: to full KV's in the same run.
        ttft_ratio: time to the first token, to full KV's.
        lost: long answers that full KV gives and this plan does not, by task: (lost, given by full KV).
        acted: False where a prompt fitted the budget, so that nothing was measured of the plan.
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
        """True when a long answer of full KV's is lost."""
        return any(lost for lost, _ in self.lost.values())

    @property
    def name(self) -> str:
        """Its method and budget."""
        return f"{self.setting.label} {self.setting.budget or ''}".strip()

    def described(self) -> dict[str, Any]:
        """JSON-ready."""
        shown = {name: value for name, value in vars(self).items() if name != "setting"}
        return {**self.setting.described(), "plan": plan_line(self.setting), **shown}


def misses(one: Candidate, limits: PlanLimits, loss: float | None = None) -> dict[str, float]:
    """Limits that a plan does not keep to, and by what factor it misses each. loss: instead of the candidate's own."""
    found = {"memory": (one.kv_bytes, limits.memory), "loss": (one.loss if loss is None else loss, limits.loss)}
    if limits.tpot is not None and one.tpot is not None:
        found["tpot"] = (one.tpot, limits.tpot)
    return {name: value / limit for name, (value, limit) in found.items() if limit is not None and value > limit}


def ranked(candidates: Sequence[Candidate], limits: PlanLimits) -> list[Candidate]:
    """Plans that acted and keep to all limits, the best first.

    The best has the least memory where the loss is limited, else the least loss; plans that lose long answers of full
    KV's come behind those that do not.
    """
    fine = [each for each in candidates if each.acted and not misses(each, limits)]

    def order(one: Candidate) -> tuple[Any, ...]:
        time = one.tpot_ratio or 1.0
        return (one.kv_bytes, one.loss, time) if limits.by_memory else (one.loss, one.kv_bytes, time)

    return sorted(fine, key=lambda one: (one.loses, *order(one)))


def nearest(candidates: Sequence[Candidate], limits: PlanLimits) -> tuple[Candidate, dict[str, float]]:
    """The plan that misses its limits by the least factor, and what it misses; of one that acted."""
    acted = [each for each in candidates if each.acted]
    best = min(acted, key=lambda one: (max(misses(one, limits).values(), default=0.0), one.loss))
    return best, misses(best, limits)


def on_frontier(one: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Tell that no other plan is better in loss, memory and time at once, or better in one and no worse in the rest."""
    mine = _costs(one)
    rest = [_costs(each) for each in candidates if each is not one and each.acted]
    return one.acted and not any(
        all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in rest
    )


def plan_line(setting: MethodSetting) -> str:
    """The call that makes the plan, as Python writes it."""
    given = {**setting.given, **({} if setting.budget is None else {"budget": setting.given.get("budget")})}
    shown = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
    return f"kvsieve.plan({setting.method!r}{shown})"


def size(count: float) -> str:
    """Bytes for people."""
    for unit, each in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= each:
            return f"{count / each:.2f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def _costs(one: Candidate) -> tuple[float, ...]:
    return (one.loss, float(one.kv_bytes), one.tpot_ratio or 1.0)
