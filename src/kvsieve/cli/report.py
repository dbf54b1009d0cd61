"""`kvsieve report`: tables and pictures of what `kvsieve eval` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsieve.cli.output import JsonOption, emit_json, print_table, show


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `kvsieve eval --out DIR` has written.")],
    formats: Annotated[str, typer.Option(help="Files in DIR/plots: png, svg or both.")] = "png,svg",
    as_json: JsonOption = False,
) -> None:
    """Write DIR/report.html, DIR/tables.md and DIR/plots from evaluation results."""
    from kvsieve.eval.report import write_report
    from kvsieve.eval.results import load

    results = load(folder)
    written = write_report(results, [each.strip() for each in formats.split(",") if each.strip()])
    if as_json:
        emit_json({**aggregated(results), "files": [str(file) for file in written]})
        return
    print_means(results)
    show(f"wrote {written[0]}, {written[1]} and {len(written) - 2} pictures in {folder / 'plots'}")


def print_means(results: Any) -> None:
    """A table per length; one column per question mode, which fits a terminal."""
    from kvsieve.eval.aggregate import budgets_of, cells, labels_of, task_means
    from kvsieve.eval.cuts import cut_documents
    from kvsieve.eval.tables import NONE, budget_name, plus_minus
    from kvsieve.report.labels import distinct

    means = task_means(cells(results.samples))
    for length in sorted(distinct(cell.length for cell in means)):
        mine = {(cell.label, cell.budget, cell.question): cell for cell in means if cell.length == length}
        questions = sorted(distinct(question for _, _, question in mine), reverse=True)
        rows = []
        for label in labels_of({"label": cell.label} for cell in mine.values()):
            for budget in budgets_of(mine.values()):
                found = [mine.get((label, budget, question)) for question in questions]
                if any(found):
                    texts = [f"{100 * cell.score:.1f}{plus_minus(cell)}" if cell else NONE for cell in found]
                    rows.append([label, budget_name(budget), *texts])
        show(f"{length} tokens, mean score over tasks in %:")
        print_table(["method", "budget", *(f"question {question}" for question in questions)], rows)
    for line in cut_documents(results.samples):
        show(line)


def aggregated(results: Any) -> dict[str, Any]:
    """JSON-ready: the run, its cells, their means over tasks and the costs."""
    from kvsieve.eval.aggregate import cells, cost_cells, task_means
    from kvsieve.eval.rows import finite

    parts = cells(results.samples)
    return {
        "run": finite(results.run),
        "cells": [cell.to_dict() for cell in parts],
        "means": [cell.to_dict() for cell in task_means(parts)],
        "costs": [cell.to_dict() for cell in cost_cells(results.costs)],
    }
