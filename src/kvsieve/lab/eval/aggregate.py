"""Aggregation of samples: cells of scores with intervals, and of costs with spreads."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvsieve.lab.eval.intervals import estimate, share_interval
from kvsieve.lab.eval.rows import Row, document, finite, groups
from kvsieve.report.labels import FULL, budget_order, distinct


@dataclass(frozen=True)
class Cell:
    """Samples of one task, length, question mode, label and budget, or of several tasks: then `task` is "mean".

    low, high: 95% interval of `score`. n: samples. tasks: number of tasks. not_applied: samples in which the method did
    not run as requested.
    """

    task: str
    length: int
    question: str
    label: str
    budget: str | None
    n: int
    score: float
    low: float
    high: float
    metrics: dict[str, float] = field(default_factory=dict)
    kl: float | None = None
    top1: float | None = None
    kl_last: float | None = None
    kv_share: float | None = None
    not_applied: int = 0
    tasks: int = 1

    @property
    def half(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    def to_dict(self) -> Row:
        return {key: finite(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Spread:
    """A measured quantity over repeats (over single tokens for tpot_s)."""

    median: float
    mean: float
    p95: float
    p99: float


@dataclass(frozen=True)
class CostCell:
    """Costs of one length, label and budget.

    repeats: number of runs. spreads: quantity -> its spread. ratios: quantity -> median over repeats of (this / full of
    the same repeat and invocation). kept: share of the prompt's tokens kept, [layers][bins], or None.
    """

    length: int
    label: str
    budget: str | None
    repeats: int
    new_tokens: int
    spreads: dict[str, Spread]
    ratios: dict[str, float]
    kept: list[list[float]] | None = None

    def median(self, quantity: str) -> float | None:
        spread = self.spreads.get(quantity)
        return None if spread is None else spread.median

    def to_dict(self) -> Row:
        """JSON-ready, without the large map of kept tokens."""
        return {key: finite(value) for key, value in asdict(self).items() if key != "kept"}


def score_interval(scores: Sequence[float], documents: Sequence[Hashable]) -> tuple[float, float]:
    """Return the 95% interval of a mean score: Clopper-Pearson, or over documents if several samples share one."""
    n = len(scores)
    if len(set(documents)) == n:
        return share_interval(math.fsum(scores), n)
    found = estimate(scores, documents, within=(0.0, 1.0))
    return found.low, found.high


def cells(samples: Iterable[Row]) -> list[Cell]:
    """Return a cell per task, length, question mode, label and budget."""
    found = groups(samples, ("task", "length", "question", "label", "budget"))
    return [_cell(key, rows) for key, rows in found.items()]


def _cell(key: tuple[Any, ...], rows: list[Row]) -> Cell:
    score = sum(row["score"] for row in rows) / len(rows)
    names = distinct(name for row in rows for name in row.get("metrics") or {} if name != "score")
    metrics = {name: mean_of((row.get("metrics") or {}).get(name) for row in rows) for name in names}
    task, length, question, label, budget = key
    low, high = score_interval([row["score"] for row in rows], [document(row) for row in rows])
    return Cell(
        task,
        length,
        question,
        label,
        budget,
        len(rows),
        score,
        low,
        high,
        metrics={name: value for name, value in metrics.items() if value is not None},
        kl=mean_of(row.get("kl") for row in rows),
        top1=mean_of(row.get("top1") for row in rows),
        kl_last=mean_of(row.get("kl_last") for row in rows),
        kv_share=mean_of(row.get("kv_share") for row in rows),
        not_applied=sum(row.get("applied") is False for row in rows),
    )


def task_means(parts: Iterable[Cell]) -> list[Cell]:
    """Return the unweighted means over tasks: a cell per length, question mode, label and budget.

    Intervals of the tasks are combined by Zou and Donner's MOVER.
    """
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in parts:
        found.setdefault((cell.length, cell.question, cell.label, cell.budget), []).append(cell)
    return [_task_mean(key, group) for key, group in found.items()]


def _task_mean(key: tuple[Any, ...], group: list[Cell]) -> Cell:
    score = sum(cell.score for cell in group) / len(group)
    n = sum(cell.n for cell in group)
    length, question, label, budget = key
    low = score - math.hypot(*(cell.score - cell.low for cell in group)) / len(group)
    high = score + math.hypot(*(cell.high - cell.score for cell in group)) / len(group)
    return Cell(
        "mean",
        length,
        question,
        label,
        budget,
        n,
        score,
        low,
        high,
        kl=mean_of(cell.kl for cell in group),
        top1=mean_of(cell.top1 for cell in group),
        kl_last=mean_of(cell.kl_last for cell in group),
        kv_share=mean_of(cell.kv_share for cell in group),
        not_applied=sum(cell.not_applied for cell in group),
        tasks=len(group),
    )


_QUANTITIES: dict[str, Callable[[Row], float | None]] = {
    "ttft_s": lambda row: row["ttft_s"],
    "tpot_s": lambda row: float(np.median(row["token_s"])) if row["token_s"] else row.get("tpot_s"),
    "total_s": lambda row: row["ttft_s"] + sum(row["token_s"]),
    "tokens_per_s": lambda row: row["new_tokens"] / (row["ttft_s"] + sum(row["token_s"])),
    "kv_bytes": lambda row: row.get("kv_bytes"),
    "kv_read_bytes": lambda row: row.get("kv_read_bytes"),
    "peak_bytes": lambda row: row.get("peak_bytes"),
    "deep_tokens": lambda row: row.get("deep_tokens"),
}


def cost_cells(costs: Iterable[Row]) -> list[CostCell]:
    """Return a cell per length, label and budget."""
    costs = list(costs)
    full = {_occasion(row): row for row in costs if row["label"] == FULL}
    return [_cost_cell(key, rows, full) for key, rows in groups(costs, ("length", "label", "budget")).items()]


def _cost_cell(key: tuple[Any, ...], rows: list[Row], full: Mapping[tuple[Any, ...], Row]) -> CostCell:
    spreads = {}
    ratios = {}
    for name, quantity in _QUANTITIES.items():
        single = [seconds for row in rows for seconds in row["token_s"]] if name == "tpot_s" else []
        values = single or [value for row in rows if (value := quantity(row)) is not None]
        if values:
            p95, p99 = np.percentile(values, [95, 99])
            spreads[name] = Spread(float(np.median(values)), float(np.mean(values)), float(p95), float(p99))
        pairs = [(quantity(row), quantity(full[_occasion(row)])) for row in rows if _occasion(row) in full]
        shares = [value / reference for value, reference in pairs if value is not None and reference]
        if shares:
            ratios[name] = float(np.median(shares))
    length, label, budget = key
    kept = rows[0].get("kept") or None
    return CostCell(length, label, budget, len(rows), rows[0]["new_tokens"], spreads, ratios, kept)


def _occasion(row: Row) -> tuple[Any, ...]:
    """Return a key shared by rows measured on the same prompt in the same invocation."""
    return row["env"], row["length"], row["repeat"]


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None."""
    present = [value for value in values if value is not None and not math.isnan(value)]
    return sum(present) / len(present) if present else None


def labels_of(rows: Iterable[Row]) -> list[str]:
    """Return the labels, full KV first, then by first occurrence."""
    return sorted(distinct(row["label"] for row in rows), key=lambda label: label != FULL)


def budgets_of(items: Iterable[Cell | CostCell]) -> list[str | None]:
    """Return the budgets, None first, then shares, then numbers of entries, ascending."""
    return sorted(distinct(item.budget for item in items), key=budget_order)
