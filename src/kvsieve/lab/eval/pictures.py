"""Pictures of a results directory, drawn and encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kvsieve.lab.eval import plots, plots_maps
from kvsieve.lab.eval.aggregate import cells, cost_cells, task_means
from kvsieve.lab.eval.results import Results
from kvsieve.lab.eval.rows import Row
from kvsieve.report.labels import distinct
from kvsieve.report.pictures import SVG_LIMIT, Picture
from kvsieve.report.plot_style import looks, png_bytes, style, svg_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDLE = "needle"
# Name, kind, title, description, and drawing function.
Wanted = tuple[str, str, str, str, Callable[[], "Figure"]]


def draw(results: Results, png: bool = True) -> list[Picture]:
    """Draw the pictures of one results directory. Raises KvsieveError if matplotlib is missing."""
    return drawn(_wanted(results), png)


def drawn(wanted: Iterable[Wanted], png: bool) -> list[Picture]:
    """Draw and encode. png: also as PNG; else only those with a large SVG."""
    found = []
    with style():
        for name, kind, title, alt, make in wanted:
            figure = make()
            svg = svg_bytes(figure)
            picture = png_bytes(figure) if png or len(svg) > SVG_LIMIT else None
            found.append(Picture(name, kind, title, alt, round(96 * figure.get_size_inches()[0]), svg, picture))
    return found


def _wanted(results: Results) -> Iterator[Wanted]:
    parts = cells(results.samples)
    costs = cost_cells(results.costs)
    look = looks(results.labels)
    means = task_means(parts)
    groups = sorted(distinct((cell.length, cell.question) for cell in parts), key=lambda g: (-g[0], g[1] != "visible"))
    for length, question in groups:
        group = [cell for cell in parts if (cell.length, cell.question) == (length, question)]
        average = [cell for cell in means if (cell.length, cell.question) == (length, question)]
        measured = [cell for cell in costs if cell.length == length]
        end = f"{length}-{question}"
        what = f"{length} tokens, question {question}"
        yield (f"accuracy-{end}", "accuracy", f"Score by budget: {what}",
               f"One panel per task: score against budget for each method, with 95% intervals; {what}. "
               "The tables hold the same numbers.",
               partial(plots.accuracy_by_budget, group, results.tasks, look))  # fmt: skip
        yield (f"tradeoff-{end}", "tradeoff", f"Mean score against cost: {what}",
               f"Mean score over tasks against KV memory, time per token and time to first token; {what}. "
               "A line joins the best scores for their cost.",
               partial(plots.trade_off, average, measured, look))  # fmt: skip
        if any(cell.kl is not None or cell.top1 is not None for cell in average):
            yield (f"fidelity-{end}", "fidelity", f"Distance to full KV: {what}",
                   f"KL divergence to full KV and agreement of the top token, against budget; {what}.",
                   partial(plots.fidelity, average, look))  # fmt: skip
    yield from _needles(results)
    for length in sorted(distinct(cell.length for cell in costs), reverse=True):
        measured = [cell for cell in costs if cell.length == length]
        yield (f"latency-{length}", "latency", f"Time for one answer: {length} tokens",
               f"Bars of the time to the first token and of decoding the rest, per method and budget; {length} tokens.",
               partial(plots.latency, measured))  # fmt: skip
        if any(plots_maps.has_map(cell) for cell in measured):
            yield (f"kept-{length}", "kept", f"Tokens kept by layer and position: {length} tokens",
                   "Heat maps of the share of tokens that each layer keeps, by position in the prompt, "
                   f"one per method and budget; {length} tokens.",
                   partial(plots_maps.kept_map, measured))  # fmt: skip


def _has_depth(row: Row) -> bool:
    return isinstance((row.get("meta") or {}).get("depth"), (int, float))


def _needles(results: Results) -> Iterator[Wanted]:
    rows = [row for row in results.samples if row["task"] == NEEDLE and _has_depth(row)]
    for question in sorted(distinct(row["question"] for row in rows), reverse=True):
        question_rows = [row for row in rows if row["question"] == question]
        yield (f"needle-{question}", "needle", f"Needle by depth: question {question}",
               f"Heat maps of the score by depth of the needle, one per method; question {question}.",
               partial(plots_maps.needle_map, question_rows, results.labels))  # fmt: skip
