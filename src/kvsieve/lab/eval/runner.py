"""Run of a grid: the missing samples, and their rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvsieve.errors import InputError
from kvsieve.hf.model.context import context_of
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.costs import measure_costs
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.grid import Grid, Unit
from kvsieve.lab.eval.outcome import sample_row
from kvsieve.lab.eval.store import ResultsWriter
from kvsieve.lab.tasks.samples import Sample

Progress = Callable[[int, int, str], None]


def run_grid(grid: Grid, evaluator: Evaluator, writer: ResultsWriter, progress: Progress | None = None) -> None:
    """Run the units that `writer` lacks. progress: called with (units done, all units, next unit).

    Raises InputError for a task that does not support a length, before or while samples run; finished rows stay.
    """
    began = time.perf_counter()
    todo = [(unit, pending) for unit in grid.units() if (pending := _pending(grid, unit, writer)) is not None]
    context = context_of(evaluator.model.config)
    total = len(todo) + (grid.cost_samples > 0)
    sample: Sample | None = None
    place: tuple[Any, ...] = ()
    for number, (unit, pending) in enumerate(todo):
        if progress is not None:
            progress(number, total, str(unit))
        if place != (unit.task.name, unit.length, unit.index) or sample is None:
            sample = unit.task.sample(unit.index, unit.length, grid.seed, evaluator.prompter.count)
            _check_room(evaluator, sample, unit, context)
            place = (unit.task.name, unit.length, unit.index)
        outcomes = evaluator.run(sample, [grid.settings[0].plan, *(setting.plan for setting in pending)], unit.question)
        # The reference runs first in any case; it is in `pending` only while its row is missing.
        rows = [
            {**sample_row(unit, sample, setting, outcome), "seed": grid.seed, "env": writer.env}
            for setting, outcome in zip([grid.settings[0], *pending], outcomes, strict=True)
            if (*unit.key, setting.label, setting.budget) not in writer.samples.done
        ]
        writer.samples.add(rows)
        writer.save(time.perf_counter() - began)
    evaluator.documents.forget()
    if grid.cost_samples:
        if progress is not None:
            progress(total - 1, total, "costs")
        measure_costs(grid, evaluator, writer)
    writer.save(time.perf_counter() - began)
    if progress is not None:
        progress(total, total, "done")


def _pending(grid: Grid, unit: Unit, writer: ResultsWriter) -> list[MethodSetting] | None:
    """Return the settings, except full KV, with missing rows; None if nothing is missing."""
    missing = [
        setting for setting in grid.settings if (*unit.key, setting.label, setting.budget) not in writer.samples.done
    ]
    return [setting for setting in missing if setting is not grid.settings[0]] if missing else None


def _check_room(evaluator: Evaluator, sample: Sample, unit: Unit, context: int | None) -> None:
    if context is None:
        return
    encoded = evaluator.prompter.encode(sample)
    follow = [ids.shape[1] for ids in encoded.followups]
    more = max(follow, default=0) if sample.independent else sum(follow)
    need = encoded.prompt.shape[1] + more + max(turn.max_new_tokens for turn in sample.turns)
    if need > context:
        raise InputError(
            f"{unit} needs {need} with its answers and later turns, the model's context ends at {context}; choose a "
            f"length of at most {context - (need - encoded.prompt.shape[1])}"
        )
