"""An advice from start to end: plans are measured, one is chosen, and its loss is stated on other documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvsieve.errors import KvsieveError
from kvsieve.hf.model.context import context_of
from kvsieve.lab.advise.choose import Candidate, PlanLimits, misses, nearest, on_frontier, ranked
from kvsieve.lab.advise.drafting import PROMPTS, DraftGain, measure_drafts
from kvsieve.lab.advise.forecast import chosen_length, forecast, pace
from kvsieve.lab.advise.intervals import LEVEL, prediction_interval
from kvsieve.lab.advise.material import AdviceMaterial, Drawn, built_in
from kvsieve.lab.advise.measure import Losses, candidate, measure_losses, measure_times
from kvsieve.lab.advise.options import AdviceOptions
from kvsieve.lab.advise.settings import candidates
from kvsieve.lab.eval.cells import MethodSetting, setting
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.report.environment import environment

Progress = Callable[[int, int, str], None]
# Most plans measured on the held-out part, and budgets at which long answers are tested.
_FINALISTS = 3
_LARGER = ("50%", "70%", "90%")


@dataclass(frozen=True)
class RecommendedPlan:
    """The recommended plan.

    Attributes:
        plan: with the measurements it was chosen by.
        loss: mean over held-out documents, nats per token of the answer.
        interval: expected for the mean over as many other documents, at `level`.
        documents: number of held-out documents.
        survive: for each kind of long answer that it loses, the smallest measured budget of the method that loses none,
            or None.
        drafts: gain of drafts by lookup; None if not measured.
    """

    plan: Candidate
    loss: float
    interval: tuple[float, float]
    documents: int
    level: float = LEVEL
    survive: dict[str, str | None] = field(default_factory=dict)
    drafts: DraftGain | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        drafts = None if self.drafts is None else asdict(self.drafts)
        return {**vars(self), "plan": self.plan.described(), "drafts": drafts}


@dataclass(frozen=True)
class Advice:
    """Measurements and the recommendation.

    Attributes:
        model: its name.
        context: tokens that the advice is for.
        measured_at: tokens of the prompts measured.
        limits: as requested.
        source: of the prompts.
        question: "visible" or "hidden".
        candidates: every measured plan, full KV first.
        choice: the recommended one; None if no plan is within the limits.
        nearest: in that case the nearest plan, and the factor by which it exceeds each limit.
        not_tried: skipped settings, with reasons.
        env: environment stamp.
        seconds: wall time.
        caution: the limits of so few questions or documents; None if there were enough.
    """

    model: str
    context: int
    measured_at: int
    limits: PlanLimits
    source: str
    question: str
    candidates: list[Candidate]
    choice: RecommendedPlan | None
    nearest: tuple[Candidate, dict[str, float]] | None
    not_tried: list[str]
    env: dict[str, Any]
    seconds: float
    caution: str | None = None

    def to_dict(self) -> dict[str, Any]:
        chosen = self.choice
        plain = {name: vars(self)[name] for name in ("model", "context", "measured_at", "source", "question")}
        return {
            **plain,
            "limits": vars(self.limits),
            "recommended": None if chosen is None else chosen.to_dict(),
            "nearest": None
            if self.nearest is None
            else {"plan": self.nearest[0].described(), "misses_by_factor": self.nearest[1]},
            "candidates": [
                {**candidate.described(), "on_frontier": on_frontier(candidate, self.candidates)}
                for candidate in self.candidates
            ],
            "not_tried": self.not_tried,
            "caution": self.caution,
            "env": self.env,
            "seconds": round(self.seconds, 1),
        }


def advise(
    model: Any,
    tokenizer: Any,
    options: AdviceOptions,
    material: AdviceMaterial | None = None,
    *,
    name: str = "",
    progress: Progress | None = None,
    announce: Callable[[int, float], None] | None = None,
) -> Advice:
    """Measure candidate plans on a model and recommend one.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        options: the context, the limits, and the extent of measuring.
        material: the prompts (default: generated ones).
        name: of the model, for the report.
        progress: called with (steps done, steps in all, next step).
        announce: called with the measured length and a forecast of the seconds.

    Raises:
        InputError: a context or material that does not suit the model.
        PlanError: a method that cannot be measured.
    """
    began = time.perf_counter()
    material = built_in() if material is None else material
    evaluator = Evaluator(model, tokenizer)
    options.check(context_of(model.config))
    settings, left_out = candidates(evaluator, options)
    per_part = options.samples * material.per_task * len(material.tasks)
    found = pace(evaluator, options.measure_at or options.context)
    count = evaluator.prompter.count
    length = material.longest(chosen_length(options, settings, per_part, found, evaluator.batch), count)
    if announce is not None:
        announce(length, forecast(options, settings, per_part, length, found, evaluator.batch))
    first = material.drawn(0, options.samples, length, options.seed, count)
    held_out = material.drawn(1, options.samples, length, options.seed, count)
    probes = material.probe_samples(options.samples, length, options.seed, count)
    # Prompts of all tasks, which follow one another.
    answered = held_out[:: max(len(held_out) // PROMPTS, 1)][:PROMPTS] if options.cost_samples else []
    total = len(first) + len(probes) + len(held_out) + options.cost_samples * len(settings) + 2 * len(answered)
    steps = _Steps(progress, total)

    losses = measure_losses(evaluator, [*first, *probes], settings, options.question, steps)
    times = measure_times(evaluator, settings, length, options.cost_samples, steps) if options.cost_samples else None
    tasks = list(dict.fromkeys(sample.task for sample in first))
    measured = [
        candidate(evaluator, one, losses[i], times[i] if times else None, context=options.context, tasks=tasks)
        for i, one in enumerate(settings)
    ]
    choice, second = _chosen(evaluator, measured, losses, held_out, options, steps)
    if choice is not None and choice.plan.loses:
        survive = _survival(evaluator, choice.plan, measured, [*first, *probes], options.question)
        choice = replace(choice, survive=survive)
    if choice is not None and answered:
        choice = _with_drafts(evaluator, choice, answered, options.question, steps, left_out)
    steps.done()
    return Advice(
        model=name,
        context=options.context,
        measured_at=length,
        limits=options.limits,
        source=material.source,
        question=options.question,
        candidates=measured,
        choice=choice,
        nearest=None if choice is not None else second or nearest(measured, options.limits),
        not_tried=left_out,
        env=environment(evaluator.model),
        seconds=time.perf_counter() - began,
        caution=material.caution,
    )


def _chosen(
    evaluator: Evaluator,
    measured: Sequence[Candidate],
    losses: Sequence[Losses],
    held: Sequence[Drawn],
    options: AdviceOptions,
    steps: _Steps,
) -> tuple[RecommendedPlan | None, tuple[Candidate, dict[str, float]] | None]:
    """Return the best plan within its limit on loss on held-out documents, too; else the nearest by that loss.

    Held-out documents decide nothing else, so the choice does not bias the loss they state.
    """
    finalists = ranked(measured, options.limits)[:_FINALISTS]
    if not finalists:
        return None, None
    settings = [measured[0].setting, *(finalist.setting for finalist in finalists)]
    again = measure_losses(evaluator, held, settings, options.question, steps)[1:]
    missed = []
    for one, repeated in zip(finalists, again, strict=True):
        known = losses[measured.index(one)]
        groups = list(repeated.loss.values())
        spread = [[*repeated.loss[task], *known.loss[task]] for task in repeated.loss]
        loss, low, high = prediction_interval(groups, spread)
        missing = misses(one, options.limits, loss)
        if not missing:
            lost = {task: _added(one.lost, repeated.lost, task) for task in {**one.lost, **repeated.lost}}
            return RecommendedPlan(Candidate(**{**vars(one), "lost": lost}), loss, (low, high), len(held)), None
        missed.append((max(missing.values()), one, missing))
    _, one, missing = min(missed, key=lambda candidate: candidate[0])
    return None, (one, missing)


def _with_drafts(
    evaluator: Evaluator,
    choice: RecommendedPlan,
    drawn: Sequence[Drawn],
    question: str,
    steps: Callable[[str], None],
    left_out: list[str],
) -> RecommendedPlan:
    """Return the plan with the gain of drafts; a failure does not spoil the advice, and is listed in `left_out`."""
    try:
        return replace(choice, drafts=measure_drafts(evaluator, choice.plan.setting.plan, drawn, question, steps))
    except KvsieveError as error:
        left_out.append(f"--draft lookup: {error}")
        return choice


def _added(one: dict[str, tuple[int, int]], other: dict[str, tuple[int, int]], task: str) -> tuple[int, int]:
    lost, answers = zip(one.get(task, (0, 0)), other.get(task, (0, 0)), strict=True)
    return sum(lost), sum(answers)


def _survival(
    evaluator: Evaluator, chosen: Candidate, measured: Sequence[Candidate], drawn: Sequence[Drawn], question: str
) -> dict[str, str | None]:
    """Return the smallest larger budget of the plan's method that loses none, for each kind of long answer it loses."""
    lost = [task for task, (count, _) in chosen.lost.items() if count]
    recommended = chosen.setting
    share = recommended.plan.evict.budget.ratio if recommended.plan.evict is not None else None
    found: dict[str, dict[float, tuple[str, bool]]] = {task: {} for task in lost}
    others = [candidate.setting for candidate in measured if candidate.setting.label == recommended.label]
    if share is not None and "budget" in recommended.parameters:
        tokenizer = evaluator.prompter.tokenizer
        known = {other.budget for other in others}
        larger = [{**recommended.given, "budget": budget} for budget in _LARGER if budget not in known]
        extra = [setting(recommended.method, parameters).for_model(evaluator.model, tokenizer) for parameters in larger]
        extra = [candidate for candidate in extra if _share(candidate) > share]
        full = measured[0].setting
        samples = [sample for sample in drawn if sample.task in lost]
        extra_losses = measure_losses(evaluator, samples, [full, *extra], question, lambda what: None)[1:]
        for larger_setting, losses in zip(extra, extra_losses, strict=True):
            for task, (count, _) in losses.lost.items():
                found[task][_share(larger_setting)] = str(larger_setting.budget), not count
    for one in measured:
        if one.setting in others and one.acted:
            for task in lost:
                if task in one.lost and _share(one.setting) > (share or 0):
                    found[task][_share(one.setting)] = str(one.setting.budget), not one.lost[task][0]
    return {
        task: next((budget for _, (budget, loses_none) in sorted(by_share.items()) if loses_none), None)
        for task, by_share in found.items()
    }


def _share(one: MethodSetting) -> float:
    evict = one.plan.evict
    return evict.budget.ratio or 0.0 if evict is not None else 0.0


class _Steps:
    """Progress counted in samples and timed runs."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.count = 0

    def __call__(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.count, self.total, what)
        self.count += 1

    def done(self) -> None:
        if self.progress is not None:
            self.progress(self.total, self.total, "done")
