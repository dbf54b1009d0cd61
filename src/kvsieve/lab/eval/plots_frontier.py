"""Plots of quality against cost: score or KL against memory and time, a row of panels per model and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvsieve.lab.eval.aggregate import Cell, CostCell, task_means
from kvsieve.lab.eval.comparison import Compared
from kvsieve.lab.eval.pictures import Wanted, drawn
from kvsieve.lab.eval.plots import FRONTIER_COLOUR, LEGEND_WIDTH, MIB, add_run_legend, frontier, scale_costs
from kvsieve.report.labels import FULL, budget_order, distinct
from kvsieve.report.pictures import Picture
from kvsieve.report.plot_style import Look, legend_height, looks, new_figure, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_BEST = "best for its cost"


@dataclass(frozen=True)
class _Point:
    """x: cost. y: score in percent, or KL in nats."""

    x: float
    y: float
    name: str
    budget: str | None


@dataclass(frozen=True)
class _Panel:
    title: str
    across: str
    points: list[_Point]


Cost = Callable[[Cell, CostCell | None], float | None]


def _ratio(name: str) -> Cost:
    def ratio(cell: Cell, cost: CostCell | None) -> float | None:
        if cost is None:
            return None
        return 1.0 if cell.label == FULL else cost.ratios.get(name)

    return ratio


def _memory(cell: Cell, cost: CostCell | None) -> float | None:
    value = None if cost is None else cost.median("kv_bytes")
    return None if value is None else value / MIB


def _share(cell: Cell, cost: CostCell | None) -> float | None:
    return None if cell.kv_share is None else 100 * cell.kv_share


# Name in files, axis label, and value.
_COSTS: tuple[tuple[str, str, Cost], ...] = (
    ("kept", "KV entries kept (%)", _share),
    ("memory", "KV memory (MiB)", _memory),
    ("ttft", "time to first token (× full KV)", _ratio("ttft_s")),
    ("tpot", "time per output token (× full KV)", _ratio("tpot_s")),
)
_ALT = (
    "A panel per model and length, of the settings that ran on most of its tasks; a grey line joins what is best for "
    "its cost. The tables hold the same numbers."
)


def short_names(entries: Sequence[Compared]) -> dict[str, str]:
    """Return label -> the method alone, if no model has two labels of it."""
    labels = [entry.subject.results.labels for entry in entries]
    methods = [[label.split()[0] for label in names] for names in labels]
    alone = {method for names in methods for method in names if all(others.count(method) < 2 for others in methods)}
    return {label: label.split()[0] if label.split()[0] in alone else label for names in labels for label in names}


def frontiers(entries: Sequence[Compared], png: bool = True) -> list[Picture]:
    """Draw all of them. png: also as PNG. Raises KvsieveError if matplotlib is missing."""
    return drawn(planned(entries), png)


def planned(entries: Sequence[Compared]) -> Iterator[Wanted]:
    """Yield pictures per question mode: score and KL against each measured cost, and task groups."""
    names = short_names(entries)
    look = looks(distinct(names.values()))
    questions = distinct(cell.question for entry in entries for cell in entry.means)
    for question in sorted(questions, reverse=True):
        for measure, what in (("score", "Mean score"), ("kl", "KL to full KV")):
            for short, across, cost in _COSTS:
                panels = [
                    panel for entry in entries for panel in _panels(entry, question, (across, cost), measure, names)
                ]
                if panels:
                    title = f"{what} against {across}: question {question}"
                    yield (f"frontier-{measure}-{short}-{question}", "frontier", title, f"{title}. {_ALT}",
                           partial(_draw, panels, look, measure))  # fmt: skip
        groups = [panel for entry in entries for panel in _groups(entry, question, names)]
        if groups:
            title = f"Score by task group against {_COSTS[0][1]}: question {question}"
            yield f"groups-{question}", "groups", title, f"{title}. {_ALT}", partial(_draw, groups, look, "score")


def _panels(
    entry: Compared, question: str, across: tuple[str, Cost], measure: str, names: dict[str, str]
) -> Iterator[_Panel]:
    """Yield a panel per length."""
    parts = [cell for cell in entry.cells if cell.question == question]
    for length in sorted(distinct(cell.length for cell in parts)):
        means = _same_tasks([cell for cell in parts if cell.length == length])
        points = _points(entry, means, across[1], measure, names)
        if {point.name for point in points} - {FULL}:
            yield _Panel(f"{entry.subject.name}, {length} tokens", across[0], points)


def _groups(entry: Compared, question: str, names: dict[str, str]) -> Iterator[_Panel]:
    """Yield a panel per length and group of tasks; the group is the prefix of a task's name."""
    parts = [cell for cell in entry.cells if cell.question == question]
    for length in sorted(distinct(cell.length for cell in parts)):
        cells = [cell for cell in parts if cell.length == length]
        groups = distinct(cell.task.partition("_")[0] for cell in cells)
        for group in groups if len(groups) > 1 else ():
            means = _same_tasks([cell for cell in cells if cell.task.partition("_")[0] == group])
            title = f"{group}: {entry.subject.name}, {length} tokens"
            yield _Panel(title, _COSTS[0][1], _points(entry, means, _COSTS[0][2], "score", names))


def _same_tasks(parts: Sequence[Cell]) -> list[Cell]:
    """Return the means of the settings with most tasks, and of full KV over the same ones."""
    tasks: dict[tuple[str, str | None], set[str]] = {}
    for cell in parts:
        if cell.label != FULL:
            tasks.setdefault((cell.label, cell.budget), set()).add(cell.task)
    most = max(tasks.values(), key=len, default=set())
    means = task_means(cell for cell in parts if cell.task in most)
    return [cell for cell in means if cell.tasks == len(most)]


def _points(entry: Compared, means: Sequence[Cell], cost: Cost, measure: str, names: dict[str, str]) -> list[_Point]:
    """Return the points. KL of zero, full KV's, has no place on a logarithmic axis."""
    found = []
    for cell in means:
        x = cost(cell, entry.costs.get((cell.length, cell.label, cell.budget)))
        y = cell.kl if measure == "kl" else 100 * cell.score
        if x is not None and y is not None and math.isfinite(y) and not (measure == "kl" and y <= 0):
            found.append(_Point(x, y, names[cell.label], cell.budget))
    return found


def _draw(panels: Sequence[_Panel], look: Mapping[str, Look], measure: str) -> Figure:
    shown = {point.name for panel in panels for point in panel.points}
    labels = [label for label in look if label in shown]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width = (2.9 if columns > 1 else 4.2) * columns + LEGEND_WIDTH
    figure = new_figure(width, max(0.4 + 2.5 * rows, legend_height([*labels, _BEST]), 3.0))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    budgets = distinct(point.budget for panel in panels for point in panel.points if point.budget)
    sizes = {budget: 22.0 + 14.0 * place for place, budget in enumerate(sorted(budgets, key=budget_order))}
    for place, axes in enumerate(grid.flat):
        if place < len(panels):
            _panel(axes, panels[place], look, sizes, measure == "kl")
        else:
            axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("KL to full KV (nats)" if measure == "kl" else "mean score (%)")
    add_run_legend(figure, labels, look, _BEST)
    return figure


def _panel(axes: Axes, panel: _Panel, look: Mapping[str, Look], sizes: Mapping[str | None, float], lower: bool) -> None:
    points = panel.points
    scale_costs(axes, [point.x for point in points])
    for point in points:
        size = sizes.get(point.budget, 110.0)
        axes.scatter(point.x, point.y, s=size, color=look[point.name].colour, marker=look[point.name].marker,
                     linewidths=0.5, edgecolors="white", zorder=3)  # fmt: skip
    for name in distinct(point.name for point in points):
        line = sorted((point for point in points if point.name == name), key=lambda point: budget_order(point.budget))
        axes.plot([point.x for point in line], [point.y for point in line], color=look[name].colour, linewidth=0.6,
                  alpha=0.5, zorder=1.5)  # fmt: skip
    best = frontier([(point.x, -point.y if lower else point.y) for point in points])
    axes.step([points[i].x for i in best], [points[i].y for i in best], where="post", color=FRONTIER_COLOUR,
              linewidth=1.2, zorder=2)  # fmt: skip
    axes.margins(x=0.1)
    if lower:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(-3, 106)
        axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(wrap(panel.title, 42, 2))
    axes.set_xlabel(panel.across)
