"""Differences between settings on the same samples, with the intervals and tests of `intervals`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvsieve.lab.eval.intervals import MeanEstimate, estimate
from kvsieve.lab.eval.rows import Row, document, groups
from kvsieve.report.labels import FULL

MEAN = "mean"
# Task, length, question, label, budget; the task is MEAN for the mean over tasks.
Place = tuple[str, int, str, str, str | None]
Pair = tuple[Row, Row]


def differences(samples: Iterable[Row], reference: Callable[[Row], Sequence[Row]]) -> dict[Place, MeanEstimate]:
    """Compare settings with others, per task and as a mean over tasks.

    Args:
        samples: rows of one model on one kind of machine.
        reference: returns the other setting's rows for a row of the same sample: at most one of them counts.

    Returns:
        Score minus the other's, by task and setting.
    """
    found: dict[Place, list[Pair]] = {}
    for place, rows in groups(samples, ("task", "length", "question", "label", "budget")).items():
        pairs = [(row, others[0]) for row in rows if (others := reference(row))]
        if pairs:
            found[place] = pairs
    means: dict[Place, list[Pair]] = {}
    for (_, length, question, label, budget), pairs in found.items():
        means.setdefault((MEAN, length, question, label, budget), []).extend(pairs)
    return {place: _difference(pairs) for place, pairs in (found | means).items()}


def against_full(samples: Sequence[Row]) -> dict[Place, MeanEstimate]:
    """Compare every setting with full KV."""
    full = _by_sample(row for row in samples if row["label"] == FULL)
    rest = [row for row in samples if row["label"] != FULL]
    return differences(rest, lambda row: full.get((*_sample(row), None), ()))


def against(samples: Sequence[Row], label: str) -> dict[Place, MeanEstimate]:
    """Compare every setting but full KV with `label` at the same budget."""
    other = _by_sample(row for row in samples if row["label"] == label)
    rest = [row for row in samples if row["label"] not in (FULL, label)]
    return differences(rest, lambda row: other.get((*_sample(row), row["budget"]), ()))


def _sample(row: Row) -> tuple[Any, ...]:
    return row["task"], row["length"], row["question"], row["sample"]


def _by_sample(rows: Iterable[Row]) -> Mapping[tuple[Any, ...], Sequence[Row]]:
    return groups(rows, ("task", "length", "question", "sample", "budget"))


def _difference(pairs: Sequence[Pair]) -> MeanEstimate:
    """Return the estimate, with samples clustered by document."""
    values = [row["score"] - other["score"] for row, other in pairs]
    return estimate(values, [document(row) for row, _ in pairs], [row["task"] for row, _ in pairs])
