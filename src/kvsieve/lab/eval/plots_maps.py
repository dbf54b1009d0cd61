"""Heat maps: needles found by position, and tokens kept by each layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsieve.lab.eval.aggregate import CostCell, budgets_of, labels_of
from kvsieve.lab.eval.rows import Row
from kvsieve.report.labels import FULL, budget_order, distinct
from kvsieve.report.plot_style import new_figure, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_DEPTHS = 11
_NAME_WIDTH = 2.1
_COLOUR_MAP = "cividis"


def needle_map(samples: Sequence[Row], labels: Sequence[str]) -> Figure:
    """Plot score by needle depth and prompt length, a panel per label and budget. A single length: depth by budget.

    samples: of the task "needle" in one question mode, each with meta.depth.
    """
    lengths = sorted(distinct(row["length"] for row in samples))
    depths = _depth_bins(samples)
    budgets = sorted(distinct(row["budget"] for row in samples), key=budget_order)
    if len(lengths) == 1:
        return _needle_by_budget(samples, labels, depths, budgets)

    def value(label: str, budget: str | None) -> np.ndarray | None:
        rows = [row for row in samples if row["label"] == label and row["budget"] == budget]
        return _means(rows, depths, lengths, lambda row: row["length"]) if rows else None

    def draw(axes: Axes, values: np.ndarray) -> Any:
        return _score_cells(axes, values, list(depths), [str(length) for length in lengths])

    wanted = [label for label in labels if any(row["label"] == label for row in samples)]
    panel = (min(3.4, max(1.7, 0.42 * len(lengths))), max(1.1, 0.21 * len(depths)))
    texts = ("prompt length (tokens)", "depth of the needle (%)", "score (%)")
    return _panel_grid(wanted, budgets, value, draw, panel, texts)


def _needle_by_budget(
    samples: Sequence[Row], labels: Sequence[str], depths: Mapping[str, Any], budgets: Sequence[str | None]
) -> Figure:
    wanted = [label for label in labels if any(row["label"] == label for row in samples)]
    columns = min(4, len(wanted))
    rows = math.ceil(len(wanted) / columns)
    figure = new_figure(max(4.6, 2.4 * columns + 0.9), 0.8 + rows * (0.55 + max(1.1, 0.21 * len(depths))))
    grid = figure.subplots(rows, columns, squeeze=False)
    for panel in grid.flat[len(wanted) :]:
        panel.set_visible(False)
    image: Any = None
    for index, (panel, label) in enumerate(zip(grid.flat, wanted, strict=False)):
        label_rows = [row for row in samples if row["label"] == label]
        shown = [budget for budget in budgets if any(row["budget"] == budget for row in label_rows)]
        values = _means(label_rows, depths, shown, lambda row: row["budget"])
        image = _score_cells(panel, values, list(depths), [budget or "all" for budget in shown])
        panel.set_title(wrap(label, 28, 4), fontsize=8.5)
        panel.tick_params(labelleft=index % columns == 0)
    figure.supxlabel("budget: KV entries kept per layer and head", fontsize=9)
    figure.supylabel("depth of the needle (%)", fontsize=9)
    figure.colorbar(image, ax=grid, label="score (%)", fraction=0.05, aspect=25)
    return figure


def _is_depth(depth: float, x: float) -> bool:
    return round(x, 3) == depth


def _is_tenth(low: int, x: float) -> bool:
    return min(int(10 * x + 1e-9), 9) == low


def _depth_bins(samples: Sequence[Row]) -> dict[str, Callable[[float], bool]]:
    """Return name of the map's row -> predicate of its depths."""
    depths = sorted(distinct(round(row["meta"]["depth"], 3) for row in samples))
    if len(depths) <= _MOST_DEPTHS:
        return {f"{100 * depth:g}": functools.partial(_is_depth, depth) for depth in depths}
    return {
        f"{10 * low}–{10 * low + 10}": functools.partial(_is_tenth, low)
        for low in sorted({min(int(10 * depth + 1e-9), 9) for depth in depths})
    }


def _means(
    samples: Sequence[Row], depths: Mapping[str, Callable[[float], bool]], columns: Sequence[Any], key: Callable
) -> np.ndarray:
    values = np.full((len(depths), len(columns)), np.nan)
    for i, within in enumerate(depths.values()):
        for j, column in enumerate(columns):
            found = [row["score"] for row in samples if key(row) == column and within(row["meta"]["depth"])]
            if found:
                values[i, j] = 100 * sum(found) / len(found)
    return values


def _score_cells(axes: Axes, values: np.ndarray, rows: list[str], columns: list[str]) -> Any:
    image = axes.imshow(values, cmap=_COLOUR_MAP, vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    axes.set_facecolor("#eeeeee")  # no sample there
    step = max(1, math.ceil(len(columns) / 6))
    axes.set_xticks(range(0, len(columns), step), columns[::step])
    axes.set_yticks(range(len(rows)), rows)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)
    if len(columns) <= 6:
        for i, j in zip(*np.nonzero(~np.isnan(values)), strict=True):
            colour = "white" if values[i, j] < 55 else "black"
            axes.text(j, i, f"{values[i, j]:.0f}", ha="center", va="center", color=colour, fontsize=7.5)
    return image


def has_map(cell: CostCell) -> bool:
    """Return True unless everything is kept."""
    return cell.kept is not None and cell.label != FULL


def kept_map(costs: Sequence[CostCell]) -> Figure:
    """Plot the share of tokens kept by each layer, by position in the prompt, a panel per label and budget.

    costs: of one length.
    """
    from matplotlib.colors import PowerNorm

    shown = [cell for cell in costs if has_map(cell)]
    by_run = {(cell.label, cell.budget): 100 * np.asarray(cell.kept, dtype=float) for cell in shown}
    # Budgets are small: the square root leaves room for differences between few and fewer.
    norm = PowerNorm(0.5, 0, 100)

    def draw(axes: Axes, values: np.ndarray) -> Any:
        layers = len(values)
        image = axes.imshow(values, cmap=_COLOUR_MAP, norm=norm, aspect="auto", interpolation="nearest",
                            extent=(0, 100, layers - 0.5, -0.5))  # fmt: skip
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_yticks(range(0, layers, max(1, math.ceil(layers / 4))))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=2)
        return image

    texts = ("position in the prompt (%)", "layer", "tokens kept (%),\nmean over KV heads")
    labels = labels_of({"label": cell.label} for cell in shown)
    figure = _panel_grid(
        labels, budgets_of(shown), lambda *run: by_run.get(run), draw, (2.5, 1.35), texts, ticks=[0, 5, 20, 50, 100]
    )
    return figure


def _panel_grid(
    labels: Sequence[str],
    budgets: Sequence[str | None],
    value: Callable[[str, str | None], np.ndarray | None],
    draw: Callable[[Axes, np.ndarray], Any],
    panel: tuple[float, float],
    texts: tuple[str, str, str],
    ticks: Sequence[float] | None = None,
) -> Figure:
    """Plot rows of labels, columns of budgets. panel: inches. texts: of the x axis, the y axis and the colour bar."""
    columns, runs = _columns(labels, budgets, value)
    width = _NAME_WIDTH + panel[0] * columns + 1.1
    figure = new_figure(width, 0.9 + len(labels) * (panel[1] + 0.12))
    grid = figure.subplots(len(labels), columns, squeeze=False)
    image: Any = None
    for i, label in enumerate(labels):
        for j in range(columns):
            axes = grid[i][j]
            if (i, j) not in runs:
                axes.set_axis_off()  # not invisible: the label's name hangs on the first panel
                continue
            budget = runs[i, j]
            found = value(label, budget)
            assert found is not None
            image = draw(axes, found)
            if runs.get((i - 1, j), "") != budget:
                axes.set_title("no budget" if budget is None else f"budget {budget}")
            below = any((row, j) in runs for row in range(i + 1, len(labels)))
            axes.tick_params(labelbottom=not below, labelleft=j == 0 or (i, j - 1) not in runs)
        grid[i][0].annotate(wrap(label, 22, 5), (0, 0.5), (-46, 0), xycoords="axes fraction", ha="right", va="center",
                            textcoords="offset points", fontsize=8.5)  # fmt: skip
    shown = [i for i in range(len(labels)) if (i, 0) in runs]
    if shown:
        grid[shown[len(shown) // 2]][0].set_ylabel(texts[1])
    figure.supxlabel(texts[0], fontsize=9)
    height = sum(figure.get_size_inches()) - width
    bar = figure.colorbar(image, ax=grid, label=texts[2], fraction=0.03, aspect=min(40, 8 * height), pad=0.02)
    if ticks:
        bar.set_ticks(list(ticks))
    return figure


def _columns(
    labels: Sequence[str], budgets: Sequence[str | None], value: Callable[[str, str | None], np.ndarray | None]
) -> tuple[int, dict[tuple[int, int], str | None]]:
    """Return the number of columns, and the budget at each used place (row, column)."""
    known = {label: [budget for budget in budgets if value(label, budget) is not None] for label in labels}
    # Labels without a budget use the first column; it is separate only if a label occurs with and without one.
    own = any(None in found and len(found) > 1 for found in known.values())
    columns: Sequence[str | None] = budgets if own else [budget for budget in budgets if budget is not None] or [None]
    places = {
        (i, 0 if budget is None else columns.index(budget)): budget
        for i, label in enumerate(labels)
        for budget in known[label]
    }
    return len(columns), places
