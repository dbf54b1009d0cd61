"""Measurements of an advice: losses on samples, times, and memory extrapolated to another context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from kvsieve.errors import PlanError
from kvsieve.hf.model.memory import layer_bytes, shapes_of
from kvsieve.lab.advise.choose import Candidate
from kvsieve.lab.advise.material import PROBES, Drawn
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.costs import NEW_TOKENS, WARM_UP, measure_one
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.outcome import Outcome
from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.lab.tasks.needle import Needle
from kvsieve.methods.base import skipped
from kvsieve.planning.plans import Plan

# An answer counts as given from this score, and as lost below full KV's score less this.
_GIVEN = 0.5
_LESS = 0.01
Step = Callable[[str], None]


@dataclass
class Losses:
    """Losses and answers of one plan on samples, by task.

    Attributes:
        loss: mean KL to full KV of each sample.
        top1: share of equal top tokens.
        score: of its answers.
        full_score: of full KV's.
        acted: False once a prompt fitted the budget.
        kept: per layer and sample, the kept share of what its budget asks for; layers that kept all are missing.
    """

    loss: dict[str, list[float]] = field(default_factory=dict)
    top1: dict[str, list[float]] = field(default_factory=dict)
    score: dict[str, list[float]] = field(default_factory=dict)
    full_score: dict[str, list[float]] = field(default_factory=dict)
    acted: bool = True
    kept: dict[int, list[float]] = field(default_factory=dict)

    def add(self, task: str, plan: Plan, outcome: Outcome, full: Outcome) -> None:
        self.loss.setdefault(task, []).append(outcome.kl)
        self.top1.setdefault(task, []).append(outcome.top1)
        self.score.setdefault(task, []).append(outcome.metrics["score"])
        self.full_score.setdefault(task, []).append(full.metrics["score"])
        self.acted = self.acted and (outcome.applied or plan.roles == ())
        record = outcome.record
        evict = plan.evict
        tokens = record.prompt_tokens - record.question
        for layer, entries in record.kept.items():
            if evict is not None and entries - record.question < tokens:
                expected = evict.entries(tokens, NEW_TOKENS)
                self.kept.setdefault(layer, []).append((entries - record.question) / expected)

    def mean(self, values: Mapping[str, Sequence[float]], tasks: Sequence[str]) -> float:
        return fmean(fmean(values[task]) for task in tasks)

    @property
    def lost(self) -> dict[str, tuple[int, int]]:
        """Return, by task of long answers, how many of full KV's answers this plan loses, and how many there are."""
        out = {}
        for task in PROBES:
            pairs = zip(self.full_score.get(task, ()), self.score.get(task, ()), strict=True)
            answered = [(full, reduced) for full, reduced in pairs if full >= _GIVEN]
            if answered:
                out[task] = sum(reduced < full - _LESS for full, reduced in answered), len(answered)
        return out


@dataclass(frozen=True)
class Times:
    """Median seconds per token after the first, and ratios to full KV in the same run."""

    tpot: float
    tpot_ratio: float
    ttft_ratio: float


def measure_losses(
    evaluator: Evaluator, drawn: Sequence[Drawn], settings: Sequence[MethodSetting], question: str, step: Step
) -> list[Losses]:
    """Run samples under all settings; the first is full KV."""
    found = [Losses() for _ in settings]
    for draw in drawn:
        step(draw.task)
        outcomes = evaluator.run(draw.sample, [one.plan for one in settings], question)
        for losses, one, outcome in zip(found, settings, outcomes, strict=True):
            losses.add(draw.task, one.plan, outcome, outcomes[0])
    return found


def measure_times(
    evaluator: Evaluator, settings: Sequence[MethodSetting], length: int, repeats: int, step: Step
) -> list[Times]:
    """Time all settings on needle prompts, in rotated order; the first is full KV."""
    needle = Needle(load_haystack("topics"))
    rows: list[list[Mapping[str, float]]] = [[] for _ in settings]
    tokens: list[list[float]] = [[] for _ in settings]
    for repeat in range(repeats):
        ids = evaluator.prompter.encode(needle.sample(repeat, length, 0, evaluator.prompter.count)).prompt
        if repeat == 0:
            measure_one(evaluator, settings[0], ids[:, :WARM_UP])
        order = [(repeat + place) % len(settings) for place in range(len(settings))]
        for place in order:
            step("times")
            row = measure_one(evaluator, settings[place], ids)
            rows[place].append({"ttft": row["ttft_s"], "tpot": median(row["token_s"][1:])})
            tokens[place] += row["token_s"][1:]
    return [
        Times(
            tpot=median(tokens[place]),
            tpot_ratio=median(
                reduced["tpot"] / full["tpot"] for reduced, full in zip(rows[place], rows[0], strict=True)
            ),
            ttft_ratio=median(
                reduced["ttft"] / full["ttft"] for reduced, full in zip(rows[place], rows[0], strict=True)
            ),
        )
        for place in range(len(settings))
    ]


def memory_at(
    evaluator: Evaluator,
    plan: Plan,
    context: int,
    kept: Mapping[int, Sequence[float]],
    layers: int | None = None,
) -> int:
    """Return the bytes of the cache of one prompt of `context` tokens.

    Args:
        evaluator: of the model.
        plan: of the model, fully specified.
        context: tokens.
        kept: as in `Losses`; missing layers keep all.
        layers: number of first layers to count; None for all.

    Raises:
        PlanError: the plan's memory there does not follow from its budget.
    """
    if plan.shortens_prompt:
        raise PlanError(f"advise does not know what {plan.name!r} stores at another context; use `kvsieve eval`")
    total = 0
    shapes = shapes_of(evaluator.model)
    for index, shape in enumerate(shapes[:layers]):
        entries = float(context)
        aside = 0.0
        if plan.rest is not None and plan.evict is not None and not skipped(plan.evict.skip_layers, index, len(shapes)):
            # Everything is stored, so the stored entries do not show how many are exact.
            entries = min(entries, plan.evict.entries(context, NEW_TOKENS))
            aside = context - entries
        elif index in kept and plan.evict is not None:
            entries = min(entries, fmean(kept[index]) * plan.evict.entries(context, NEW_TOKENS))
        total += layer_bytes(plan, shape, evaluator.model.dtype.itemsize, entries, aside=aside)
    return total


def least_memory_at(evaluator: Evaluator, plan: Plan, context: int, layers: int | None = None) -> int:
    """Return the bytes of a prompt's cache by its budget, without propagation. layers: see `memory_at`."""
    shapes = shapes_of(evaluator.model)
    evicts = plan.evict is not None and not plan.is_view
    kept: dict[int, tuple[float, ...]] = {index: (1.0,) for index in range(len(shapes))} if evicts else {}
    return memory_at(evaluator, plan, context, kept, layers)


def certain_memory_at(evaluator: Evaluator, plan: Plan, context: int) -> int:
    """Return the bytes of a prompt's cache in the layers that all of its tokens reach."""
    layers = None if plan.propagate is None else plan.propagate.source(len(shapes_of(evaluator.model))) + 1
    return least_memory_at(evaluator, plan, context, layers)


def candidate(
    evaluator: Evaluator,
    setting: MethodSetting,
    losses: Losses,
    times: Times | None,
    *,
    context: int,
    tasks: Sequence[str],
) -> Candidate:
    """Gather the measurements of a setting. tasks: those of the loss."""
    return Candidate(
        setting=setting,
        kv_bytes=memory_at(evaluator, setting.plan, context, losses.kept),
        loss=losses.mean(losses.loss, tasks),
        top1=losses.mean(losses.top1, tasks),
        score=losses.mean(losses.score, tasks),
        tpot=None if times is None else times.tpot,
        tpot_ratio=None if times is None else times.tpot_ratio,
        ttft_ratio=None if times is None else times.ttft_ratio,
        lost=losses.lost,
        acted=losses.acted,
    )
