"""`kvsieve report`: tables and pictures of results of `kvsieve eval`, of one directory or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsieve.cli.options import OUTPUT, expanded, option
from kvsieve.cli.output import NARROW, JsonOption, check_folder, check_writable, emit_json, print_table, show
from kvsieve.errors import InputError

_COMPARISON = Path("comparison")


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Results directories of `kvsieve eval`", callback=expanded)
    ],
    out: Annotated[
        Path | None,
        option(OUTPUT, "Directory for a report of several DIRs (default: ./comparison)", callback=expanded),
    ] = None,
    baseline: Annotated[
        str | None, option(OUTPUT, "Method, or its label, to compare with besides full KV (default: none)")
    ] = None,
    formats: Annotated[str, option(OUTPUT, "File formats of plots: png, svg or both")] = "png,svg",
    csv: Annotated[
        Path | None, option(OUTPUT, "CSV file with one row per cell (default: none)", callback=expanded)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html, tables.md and plots for one results directory, or a comparison of several to --out."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"no results at '{folder}': it is not a directory; run `kvsieve eval --out {folder}` first"
            )

    check_folder("--out", out)
    check_writable("--csv", csv)

    from kvsieve.lab.eval.comparison import compared
    from kvsieve.lab.eval.comparison_report import write_comparison
    from kvsieve.lab.eval.export import write_csv
    from kvsieve.lab.eval.merge import subjects
    from kvsieve.lab.eval.report import check_formats, write_report
    from kvsieve.lab.eval.results import load

    wanted = [name.strip() for name in formats.split(",") if name.strip()]
    check_formats(wanted)
    directories = [load(folder) for folder in {folder.resolve(): folder for folder in folders}.values()]
    alone = len(directories) == 1
    if alone and out is not None:
        raise InputError("--out is for the report of several directories; that of one is written into it: leave it out")
    entries = compared(subjects(directories), baseline)
    folder = directories[0].folder if alone else out or _COMPARISON
    written = write_report(entries[0], wanted) if alone else write_comparison(entries, folder, wanted)
    if csv is not None:
        write_csv(entries, csv)
        written.append(csv)
    if as_json:
        found = [{"name": entry.subject.name, **aggregated(entry.subject.results)} for entry in entries]
        data = aggregated(directories[0]) if alone else {"subjects": found}
        emit_json({**data, "differences": _differences(entries), "files": [str(file) for file in written]})
        return
    if alone:
        print_means(directories[0])
    else:
        _print_comparison(entries)
    pictures = len(written) - 2 - (csv is not None)
    show(f"wrote {written[0]}, {written[1]}{f', {csv}' if csv else ''} and {pictures} pictures in {folder / 'plots'}")


def _differences(entries: Any) -> list[dict[str, Any]]:
    names = ("task", "length", "question", "label", "budget")
    return [
        {"subject": entry.subject.name, "against": against, **dict(zip(names, place, strict=True)), **one.to_dict()}
        for entry in entries
        for against, found in (("full", entry.from_full), (entry.baseline, entry.from_baseline))
        for place, one in found.items()
    ]


def _print_comparison(entries: Any) -> None:
    """Print the tables that compare, with the columns that fit a terminal."""
    from kvsieve.lab.eval.comparison import comparison_tables

    wanted = ("model", "method", "budget", "score", "against full", "against baseline", "KL", "KV kept %")
    for table in reversed(comparison_tables(entries)):
        places = [table.headers.index(name) for name in wanted if name in table.headers]
        show(f"{table.title}:")
        print_table([table.headers[at] for at in places], [[row[at].text for at in places] for row in table.rows],
                    left=3)  # fmt: skip


def print_means(results: Any) -> None:
    from kvsieve.lab.eval.aggregate import budgets_of, cells, labels_of, task_means
    from kvsieve.lab.eval.rows import cut_documents
    from kvsieve.lab.eval.tables import NONE, budget_name, plus_minus
    from kvsieve.report.labels import distinct

    means = task_means(cells(results.samples))
    for length in sorted(distinct(cell.length for cell in means)):
        grid = {(cell.label, cell.budget, cell.question): cell for cell in means if cell.length == length}
        questions = sorted(distinct(question for _, _, question in grid), reverse=True)
        rows = []
        for label in labels_of({"label": cell.label} for cell in grid.values()):
            for budget in budgets_of(grid.values()):
                found = [grid.get((label, budget, question)) for question in questions]
                if any(found):
                    texts = [f"{100 * cell.score:.1f}{plus_minus(cell)}" if cell else NONE for cell in found]
                    rows.append([label, budget_name(budget), *texts])
        show(f"{length} tokens, mean score over tasks in %:")
        headers = ["method", "budget", *(f"question {question}" for question in questions)]
        print_table(headers, rows, width=NARROW)
    for line in cut_documents(results.samples):
        show(line)


def aggregated(results: Any) -> dict[str, Any]:
    from kvsieve.lab.eval.aggregate import cells, cost_cells, task_means
    from kvsieve.lab.eval.rows import finite

    parts = cells(results.samples)
    return {
        "run": finite(results.run),
        "cells": [cell.to_dict() for cell in parts],
        "means": [cell.to_dict() for cell in task_means(parts)],
        "costs": [cell.to_dict() for cell in cost_cells(results.costs)],
    }
