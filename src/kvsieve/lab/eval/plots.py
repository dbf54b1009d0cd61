"""Plots of accuracy, cost and distance to full KV: each function returns a Figure of aggregated cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvsieve.lab.eval.aggregate import Cell, CostCell, budgets_of
from kvsieve.report.labels import FULL, budget_order, distinct
from kvsieve.report.plot_style import Look, add_legend, budget_places, legend_height, new_figure, set_budget_axis, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
LEGEND_WIDTH = 2.7
FRONTIER_COLOUR = "#8a8a8a"
BEST = "best score for its cost"


def accuracy_by_budget(parts: Sequence[Cell], titles: Mapping[str, str], style: Mapping[str, Look]) -> Figure:
    """Plot score against budget with 95% intervals, full KV as a dashed line; a panel per task.

    parts: cells of one length and question mode.
    """
    tasks = [task for task in titles if any(cell.task == task for cell in parts)]
    labels = [label for label in style if any(cell.label == label for cell in parts)]
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    height = max(0.6 + 2.05 * rows, legend_height(labels), 2.9)
    figure = new_figure((2.75 if columns > 1 else 4.6) * columns + LEGEND_WIDTH, height)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    places = budget_places(budgets_of(parts)) or {"": 0.0}
    handles: dict[str, object] = {}
    for index, panel in enumerate(grid.flat):
        if index >= len(tasks):
            panel.set_visible(False)
            continue
        cells = [cell for cell in parts if cell.task == tasks[index]]
        handles.update(_score_lines(panel, cells, labels, style, places))
        panel.set_title(wrap(titles[tasks[index]], 36, 2))
        _percent_grid(panel)
        # With shared axes only the lowest row has tick labels; a short last row leaves columns without.
        panel.tick_params(labelbottom=index + columns >= len(tasks))
    set_budget_axis(grid[0][0], places)
    figure.supxlabel("budget: KV entries kept per layer and head", fontsize=9)
    figure.supylabel("score (%)", fontsize=9)
    add_legend(figure, [handles[label] for label in labels if label in handles], [n for n in labels if n in handles])
    return figure


def _score_lines(
    axes: Axes, parts: Sequence[Cell], labels: Sequence[str], style: Mapping[str, Look], places: Mapping[str, float]
) -> dict[str, object]:
    """Draw one panel. Returns label -> legend handle."""
    handles: dict[str, object] = {}
    span = max(places.values()) - min(places.values()) or 1.0
    for index, label in enumerate(labels):
        cells = [cell for cell in parts if cell.label == label]
        # Side by side, so that whiskers of equal scores do not hide each other.
        shift = 0.012 * span * (index - len(labels) / 2) * min(1.0, 8 / len(labels))
        level = next((cell for cell in cells if cell.budget is None), None)
        if level is not None:
            dashes = (0, (5, 3)) if label == FULL else (0, (1, 1.5))
            handles[label] = axes.axhline(
                100 * level.score, color=style[label].colour, linestyle=dashes, linewidth=1.3, zorder=1.5
            )
        cells = sorted((cell for cell in cells if cell.budget is not None), key=lambda cell: budget_order(cell.budget))
        if cells:
            handles[label] = axes.errorbar(
                [places[cell.budget or ""] + shift for cell in cells],
                [100 * cell.score for cell in cells],
                [[100 * (c.score - c.low) for c in cells], [100 * (c.high - c.score) for c in cells]],
                color=style[label].colour, marker=style[label].marker, markersize=5, linewidth=1.4, elinewidth=0.7,
                capsize=1.5, zorder=2 + index / 100,
            )  # fmt: skip
    return handles


def _percent_grid(axes: Axes) -> None:
    axes.set_ylim(-3, 104)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def trade_off(means: Sequence[Cell], costs: Sequence[CostCell], style: Mapping[str, Look]) -> Figure:
    """Plot mean score against KV memory, time per token and time to first token, each with its frontier.

    means, costs: of one length and question mode. Without costs the share of KV entries is used for memory.
    """
    by_run = {(cell.label, cell.budget): cell for cell in costs}
    axes_wanted = (("KV memory (MiB)", "kv_bytes", 1 / MIB), ("time per output token, median (ms)", "tpot_s", 1e3),
                   ("time to first token, median (s)", "ttft_s", 1.0))  # fmt: skip
    panels = []
    for title, quantity, scale in axes_wanted:
        found = [(cell, by_run[cell.label, cell.budget].median(quantity)) for cell in means
                 if (cell.label, cell.budget) in by_run]  # fmt: skip
        panels.append((title, [(cell, x * scale) for cell, x in found if x is not None]))
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        panels = [("KV entries kept (%)", [(c, 100 * c.kv_share) for c in means if c.kv_share is not None])]
    labels = [label for label in style if any(cell.label == label for cell in means)]
    figure = new_figure(2.9 * len(panels) + LEGEND_WIDTH, max(3.5, legend_height([*labels, BEST])))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for panel, (title, points) in zip(grid.flat, panels, strict=True):
        _scatter(panel, points, style, budgets_of(means))
        panel.set_xlabel(title)
    grid[0][0].set_ylabel("mean score over tasks (%)")
    add_run_legend(figure, labels, style, BEST)
    return figure


def add_run_legend(figure: Figure, labels: Sequence[str], style: Mapping[str, Look], best: str) -> None:
    """Add a legend of the points of runs, and of the line that joins the best ones, by that name."""
    from matplotlib.lines import Line2D

    handles: list[object] = [
        Line2D([], [], color=style[n].colour, marker=style[n].marker, linestyle="", markersize=8 if n == FULL else 6)
        for n in labels
    ]
    handles.append(Line2D([], [], color=FRONTIER_COLOUR, linewidth=1.2))
    add_legend(figure, handles, [*labels, best])


def scale_costs(axes: Axes, xs: Sequence[float]) -> None:
    """Give the axis of costs a logarithmic scale if they differ much."""
    if xs and min(xs) > 0 and max(xs) / min(xs) > 6:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _scatter(
    axes: Axes, points: Sequence[tuple[Cell, float]], style: Mapping[str, Look], budgets: Sequence[str | None]
) -> None:
    limits: list[str | None] = [budget for budget in budgets if budget is not None]
    sizes = {budget: 22.0 + 18.0 * place for place, budget in enumerate(limits)}
    scale_costs(axes, [x for _, x in points])
    for cell, x in points:
        look = style[cell.label]
        axes.scatter(x, 100 * cell.score, s=sizes.get(cell.budget, 110), color=look.colour, marker=look.marker,
                     linewidths=0.5, edgecolors="white", zorder=3)  # fmt: skip
    best = frontier([(x, cell.score) for cell, x in points])
    axes.step([points[i][1] for i in best], [100 * points[i][0].score for i in best], where="post",
              color=FRONTIER_COLOUR, linewidth=1.2, zorder=2)  # fmt: skip
    axes.margins(x=0.12)
    _percent_grid(axes)
    axes.set_ylim(-3, 109)
    taken: list[tuple[float, float]] = []
    for index in reversed(best):
        cell, x = points[index]
        across, up = (axes.transScale + axes.transLimits).transform((x, 100 * cell.score))
        if any(abs(across - other) < 0.12 and abs(up - height) < 0.09 for other, height in taken):
            continue  # its text would cover a better point's
        taken.append((across, up))
        axes.annotate(cell.budget or "all", (x, 100 * cell.score), (0, 7), textcoords="offset points", fontsize=7.5,
                      ha="center", zorder=4)  # fmt: skip


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto-optimal points (cost, score), by rising cost."""
    best = float("-inf")
    chosen = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            best = points[index][1]
            chosen.append(index)
    return chosen


def latency(costs: Sequence[CostCell]) -> Figure:
    """Plot prefill and decode time of one answer as horizontal bars per label and budget. costs: of one length."""
    labels = distinct(cell.label for cell in costs)
    names = {label: wrap(label, 30, 3) for label in labels}
    # A group's height fits both its bars and its name.
    heights = {
        label: max(sum(cell.label == label for cell in costs), 0.62 * (names[label].count("\n") + 1))
        for label in labels
    }
    figure = new_figure(9.6, 1.0 + 0.235 * (sum(heights.values()) + 0.55 * len(labels)))
    axes = figure.subplots()
    top = 0.0
    ticks = []
    tick_names = []
    longest = 0.0
    for label in labels:
        cells = sorted((cell for cell in costs if cell.label == label), key=lambda cell: budget_order(cell.budget))
        for place, cell in enumerate(cells):
            y = top + (heights[label] - len(cells)) / 2 + place + 0.5
            longest = max(longest, _time_bar(axes, y, cell))
            ticks.append(y)
            tick_names.append(cell.budget or "all")
        axes.annotate(names[label], (0, top + heights[label] / 2), (-44, 0), xycoords=axes.get_yaxis_transform(),
                      textcoords="offset points", ha="right", va="center", fontsize=8.5, linespacing=1.1)  # fmt: skip
        top += heights[label] + 0.55
    axes.set_yticks(ticks, tick_names)
    axes.set_ylim(top - 0.3, -0.3)
    axes.set_xlim(0, longest * 1.17)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"seconds for an answer of {costs[0].new_tokens} tokens (medians); right: ratio to full KV")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def _time_bar(axes: Axes, y: float, cell: CostCell) -> float:
    """Draw one bar. Returns its length in seconds."""
    prefill = cell.median("ttft_s") or 0.0
    step = cell.median("tpot_s") or 0.0
    decode = step * max(cell.new_tokens - 1, 0)
    first = not axes.patches
    axes.barh(y, prefill, 0.78, color="#0072B2", label="time to first token" if first else None)
    axes.barh(y, decode, 0.78, left=prefill, color="#E69F00", hatch="////", edgecolor="white", linewidth=0,
              label="decoding the other tokens" if first else None)  # fmt: skip
    ratio = cell.ratios.get("total_s")
    if ratio is not None and cell.label != FULL:
        axes.annotate(f"{ratio:.2f}×", (prefill + decode, y), (3, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    return prefill + decode


def fidelity(means: Sequence[Cell], style: Mapping[str, Look]) -> Figure:
    """Plot distance to full KV against budget: KL divergence and share of tokens with the same top choice."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    places = budget_places(budgets_of(means)) or {"": 0.0}
    labels = [label for label in style if label != FULL and any(cell.label == label for cell in means)]
    figure = new_figure(8.0 + LEGEND_WIDTH, max(3.3, legend_height(labels)))
    left, right = figure.subplots(1, 2)
    for label in labels:
        cells = [cell for cell in means if cell.label == label]
        for axes, name, scale in ((left, "kl", 1.0), (right, "top1", 100.0)):
            # A logarithmic axis has no place for zero, and none has one for infinity.
            points = [(cell.budget, scale * value) for cell in cells if (value := getattr(cell, name)) is not None
                      and math.isfinite(value) and (name == "top1" or value > 0)]  # fmt: skip
            _fidelity_line(axes, points, style[label], places)
    if left.lines:
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
    left.set_ylabel("KL divergence (nats)")
    left.set_title("KL to full KV, mean per token (lower is closer)")
    right.set_ylabel("tokens (%)")
    right.set_title("Same top-1 token as full KV (higher is closer)")
    right.set_ylim(top=100.5)
    for axes in (left, right):
        axes.grid(color="#dddddd", linewidth=0.6)
        set_budget_axis(axes, places)
        axes.set_xlabel("budget: KV entries kept per layer and head")
    handles = [Line2D([], [], color=style[n].colour, marker=style[n].marker, markersize=5) for n in labels]
    add_legend(figure, handles, labels)
    return figure


def _fidelity_line(
    axes: Axes, points: Sequence[tuple[str | None, float]], look: Look, places: Mapping[str, float]
) -> None:
    curve = sorted((places[budget], value) for budget, value in points if budget is not None)
    if curve:
        axes.plot(*zip(*curve, strict=True), color=look.colour, marker=look.marker, markersize=5, linewidth=1.4)
    for value in (value for budget, value in points if budget is None):
        axes.axhline(value, color=look.colour, linestyle=(0, (1, 1.5)), linewidth=1.3)
