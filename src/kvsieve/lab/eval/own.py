"""Comparisons from Python: any task or rows, under methods, plans and role objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

from kvsieve.errors import InputError, short
from kvsieve.hf.model.context import context_of
from kvsieve.lab.eval.cells import MethodSetting, setting, warn_unlike
from kvsieve.lab.eval.grid import QUESTIONS, Grid
from kvsieve.lab.eval.outcome import Outcome, sample_row
from kvsieve.lab.eval.rows import Row
from kvsieve.lab.tasks.document_task import DocumentTask
from kvsieve.lab.tasks.fit import Count
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.rows import rows_task
from kvsieve.lab.tasks.samples import Sample, Task
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Role, base_of, budgets_of
from kvsieve.planning.settled import settled_role
from kvsieve.planning.specs import split_specs
from kvsieve.report.labels import FULL

Method = str | Plan | Role
Methods = Method | Sequence[Method] | Mapping[str, Method]
TaskOrRows = Task | str | Path | Sequence[Mapping[str, Any]]
_LENGTH = 2048
_SAMPLES = 25


class SampleRunner(Protocol):
    """The part of an Evaluator used by comparisons."""

    model: Any
    prompter: Prompter

    def run(self, sample: Sample, plans: Sequence[Plan], question: str) -> list[Outcome]: ...


def compared_rows(
    evaluator: SampleRunner,
    task: TaskOrRows,
    methods: Methods,
    *,
    score: str | Callable[..., Any] = "contains",
    length: int | None = None,
    samples: int | None = None,
    question: str = "visible",
    seed: int = 0,
) -> list[Row]:
    """Return a row per sample and method; see Evaluator.compare."""
    task = task if isinstance(task, Task) else rows_task(task, score)
    if question not in QUESTIONS or question not in task.modes:
        raise InputError(f"question must be {' or '.join(task.modes)} for {task.name}, got {short(question)}")
    if length is None:
        length = _LENGTH
        if isinstance(task, DocumentTask):
            length = whole_length(task, evaluator.model, evaluator.prompter.count)
    if samples is None:
        samples = len(task) if isinstance(task, Sized) else _SAMPLES
    settings = compared_settings(methods, evaluator.model, evaluator.prompter.tokenizer)
    warn_unlike(settings)
    grid = Grid((task,), (length,), (question,), samples, settings, seed)
    grid.check(context_of(evaluator.model.config))
    rows = []
    for unit in grid.units():
        sample = task.sample(unit.index, length, seed, evaluator.prompter.count)
        outcomes = evaluator.run(sample, [setting.plan for setting in settings], question)
        rows += [sample_row(unit, sample, *pair) for pair in zip(settings, outcomes, strict=True)]
    return rows


def whole_length(task: DocumentTask, model: Any, count: Count) -> int:
    """Return the tokens of a task's longest prompt, at most the model's context less an answer."""
    longest = task.tokens(count)
    context = context_of(model.config)
    return longest if context is None else min(longest, context - task.answer_tokens)


def compared_settings(methods: Methods, model: Any, tokenizer: Any) -> list[MethodSetting]:
    """Return full KV and the settings of methods, fully specified.

    Raises:
        InputError: an invalid method, or two settings with one label and budget.
    """
    if isinstance(methods, Method):
        methods = [methods]
    labelled: Iterable[tuple[str | None, Method]]
    labelled = methods.items() if isinstance(methods, Mapping) else [(None, method) for method in methods]
    out = [setting(FULL, {})]
    for label, method in labelled:
        one = _setting(method, model, tokenizer)
        if not one.plan.roles:
            continue
        one = one if label is None else dataclasses.replace(one, label=label)
        if any((one.label, one.budget) == (other.label, other.budget) for other in out):
            raise InputError(
                f"two methods are called {one.label!r} at a budget of {one.budget}; give a dict with a label for each, "
                "such as {'mine': Mine(budget='20%')}"
            )
        out.append(one)
    return out


def _setting(method: Method, model: Any, tokenizer: Any) -> MethodSetting:
    if isinstance(method, str):
        specs = split_specs(method)
        if len(specs) != 1:
            raise InputError(f"a method is written like 'snapkv:budget=20%', got {short(method)}")
        ((name, arguments),) = specs
        return setting(name, arguments).for_model(model, tokenizer)
    if isinstance(method, Role):
        plan = settled_role(method, model, tokenizer).for_model(model, tokenizer)
    elif isinstance(method, Plan):
        plan = method.for_model(model, tokenizer)
    else:
        raise InputError(f"methods are names like 'snapkv:budget=20%', plans and role objects, got {short(method)}")
    parameters = _parameters_of(plan)
    came = {} if plan.filled is None else plan.filled.values
    label = " ".join([plan.name, *(f"{name}={value}" for name, value in came.items())])
    budgets = [str(budget) for role in plan.roles for budget in budgets_of(vars(plan)[role])]
    # A role object has all of its parameters.
    return MethodSetting(plan.name, label, budgets[0] if budgets else None, parameters, plan, parameters)


def _parameters_of(plan: Plan) -> dict[str, Any]:
    """Return the fields of evictor and propagator, JSON-ready, including a wrapper's base."""
    parts: list[Role | None] = [plan.propagate, plan.evict, base_of(plan.evict)]
    fields = {name: value for part in parts if part is not None for name, value in vars(part).items()}
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in fields.items()
        if isinstance(value, (*plain, Budget))
    }
