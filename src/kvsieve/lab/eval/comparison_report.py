"""Report of several results directories: models and machines side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvsieve.lab.eval.aggregate import Cell
from kvsieve.lab.eval.comparison import Compared, comparison_tables
from kvsieve.lab.eval.plots_frontier import frontiers
from kvsieve.lab.eval.report import (
    DIFFERENCES,
    FORMATS,
    GLOSSARY,
    check_formats,
    differences_section,
    markdown_tables,
    unfolding,
    write_all,
)
from kvsieve.lab.eval.rows import cut_documents
from kvsieve.lab.eval.tables import bounds, make_tables, plus_minus
from kvsieve.report import html as h
from kvsieve.report.pictures import Picture
from kvsieve.report.tables import Entry, Table

TITLE = "kvsieve evaluations compared"
_GUIDE = (
    "Every model is compared with its own full KV, on the same samples under a budget of KV entries; “visible” means "
    "that a method could see the question when it chose what to keep, “hidden” that the question came afterwards. "
    "Scores of different models are means over the tasks that each was evaluated on."
)


def write_comparison(entries: Sequence[Compared], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write report.html, tables.md and plots/ of several subjects into `folder`; return the files.

    Raises InputError for an unknown format, KvsieveError if matplotlib is missing.
    """
    check_formats(formats)
    pictures = frontiers(entries, png="png" in formats)
    return write_all(folder, _page(entries, pictures), _markdown(entries), pictures, formats)


def _markdown(entries: Sequence[Compared]) -> str:
    tasks, fidelity, costs = _per_subject(entries, plus_minus)
    groups = (("What was compared", [_subjects(entries)]), (DIFFERENCES, comparison_tables(entries)),
              ("Scores per task", tasks), ("Distance to full KV", fidelity), ("Costs", costs))  # fmt: skip
    return markdown_tables(TITLE, groups, warnings(entries))


def _page(entries: Sequence[Compared], pictures: Sequence[Picture]) -> str:
    tasks, fidelity, costs = _per_subject(entries, bounds)
    sections = [
        ("subjects", "What was compared", h.table(_subjects(entries))),
        ("differences", DIFFERENCES, differences_section(comparison_tables(entries))),
        (
            "frontier",
            "Quality against cost",
            h.figures([picture for picture in pictures if picture.kind == "frontier"]),
        ),
        ("groups", "By task group", h.figures([picture for picture in pictures if picture.kind == "groups"])),
        ("tasks", "Scores per task", unfolding(tasks)),
        ("fidelity", "Distance to full KV", unfolding(fidelity)),
        ("costs", "Costs", unfolding(costs)),
        ("glossary", "Glossary", h.definitions(GLOSSARY)),
    ]
    warned = "\n".join(h.paragraph(text, "warn") for text in warnings(entries))
    return h.page(TITLE, [section for section in sections if section[2]], f"{h.paragraph(_GUIDE)}\n{warned}")


def warnings(entries: Sequence[Compared]) -> list[str]:
    """Return caveats for comparing rows of different models."""
    texts = []
    tasks = {frozenset(entry.subject.results.tasks) for entry in entries}
    if len(tasks) > 1:
        texts.append("The tasks are not the same for all models: compare differences to full KV, not scores.")
    for entry in entries:
        texts += [f"{entry.subject.name}: {text}." for text in cut_documents(entry.subject.results.samples)]
        failed = sum(cell.not_applied for cell in entry.cells)
        if failed:
            texts.append(f"{entry.subject.name}: in {failed} of {len(entry.subject.results.samples)} answers the "
                         "method did not run as asked; they count in the means.")  # fmt: skip
    return texts


def _subjects(entries: Sequence[Compared]) -> Table:
    headers = ["name", "machine", "dtype", "directories", "seed", "tasks", "answers", "timed runs"]
    rows = []
    for entry in entries:
        subject = entry.subject
        results = entry.subject.results
        folders = ", ".join(str(folder) for folder in subject.folders)
        counts = [results.run["seed"], len(results.tasks), len(results.samples), len(results.costs)]
        row = [subject.name, subject.machine, results.run["dtype"], folders, *map(str, counts)]
        rows.append([Entry(text) for text in row])
    return Table("Models", headers, rows, 4)


def _per_subject(entries: Sequence[Compared], interval: Callable[[Cell], str]) -> list[list[Table]]:
    """Return tables of scores per task, distances and costs, each with its subject in the title."""
    entry_tables = [(entry, make_tables(entry.subject.results, interval, entry.from_full)) for entry in entries]

    def titled(name: str) -> list[Table]:
        return [replace(table, title=f"{entry.subject.name}: {table.title}")
                for entry, tables in entry_tables for table in getattr(tables, name)]  # fmt: skip

    return [titled("tasks"), titled("fidelity"), titled("costs")]
