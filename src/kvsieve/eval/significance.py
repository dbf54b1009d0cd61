"""Differences between settings on the same samples, and which of them are more than chance: a paired bootstrap."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvsieve.eval.rows import Row, groups
from kvsieve.report.labels import FULL

RESAMPLES = 10_000
LEVEL = 0.05
FEWEST = 10
# So many must differ before all of them on one side are less likely than LEVEL by a coin's tosses: 2 / 2**6.
FEWEST_DIFFERENT = 6
MEAN = "mean"
_SEED = 20_260_101
# Task, length, question, label, budget; the task is MEAN for the mean over tasks.
Place = tuple[str, int, str, str, str | None]


@dataclass(frozen=True)
class Difference:
    """Mean score of a setting less that of another on the same samples.

    Attributes:
        mean: Score less the other's, -1 to 1; of several tasks, each of the same weight.
        low: Lower end of the 95% interval.
        high: Upper end of the 95% interval.
        p: Two-sided; the share of resamples beyond zero, twice.
        n: Samples that both have.
        clusters: Documents they are about; samples, where each has its own.
        different: Clusters in which the two differ.
        tasks: Tasks in the mean.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    clusters: int
    different: int
    tasks: int = 1

    @property
    def verdict(self) -> str:
        """lower, higher, level, or few: too few samples to claim anything."""
        if self.n < FEWEST or self.clusters < FEWEST_DIFFERENT:
            return "few"
        if self.p >= LEVEL:
            return "level"
        if self.different < FEWEST_DIFFERENT:
            return "few"
        return "lower" if self.mean < 0 else "higher"

    @property
    def chance(self) -> str:
        """p as it is written behind a verdict."""
        return next(f"p<{bound}" for bound in (0.001, 0.01, LEVEL, 2) if self.p < bound)

    def to_dict(self) -> Row:
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True)
class _Resampled:
    """A difference of one task with the means of its resamples, [RESAMPLES]."""

    difference: Difference
    means: np.ndarray


def differences(samples: Iterable[Row], reference: Callable[[Row], Sequence[Row]]) -> dict[Place, Difference]:
    """Compare settings with others, per task and as a mean over tasks.

    Args:
        samples: Rows of one model on one kind of machine.
        reference: The other setting's rows for a setting's row of the same sample: at most one of them counts.
    """
    found: dict[Place, _Resampled] = {}
    for place, rows in groups(samples, ("task", "length", "question", "label", "budget")).items():
        pairs = [(row, others[0]) for row in rows if (others := reference(row))]
        if pairs:
            found[place] = _of_task(place, pairs)
    means: dict[Place, list[_Resampled]] = {}
    for (_, length, question, label, budget), each in found.items():
        means.setdefault((MEAN, length, question, label, budget), []).append(each)
    return {
        **{place: each.difference for place, each in found.items()},
        **{place: _over_tasks(several) for place, several in means.items()},
    }


def against_full(samples: Sequence[Row]) -> dict[Place, Difference]:
    """Compare every setting with full KV."""
    full = _by_sample(row for row in samples if row["label"] == FULL)
    rest = [row for row in samples if row["label"] != FULL]
    return differences(rest, lambda row: full.get((*_sample(row), None), ()))


def against(samples: Sequence[Row], label: str) -> dict[Place, Difference]:
    """Compare every setting but full KV with `label` at the same budget."""
    other = _by_sample(row for row in samples if row["label"] == label)
    rest = [row for row in samples if row["label"] not in (FULL, label)]
    return differences(rest, lambda row: other.get((*_sample(row), row["budget"]), ()))


def _sample(row: Row) -> tuple[Any, ...]:
    return row["task"], row["length"], row["question"], row["sample"]


def _by_sample(rows: Iterable[Row]) -> Mapping[tuple[Any, ...], Sequence[Row]]:
    return groups(rows, ("task", "length", "question", "sample", "budget"))


def _of_task(place: Place, pairs: Sequence[tuple[Row, Row]]) -> _Resampled:
    """Resample documents with all samples about them; samples, where each has a document of its own."""
    sums: dict[Any, list[float]] = {}
    for row, other in pairs:
        document = (row.get("meta") or {}).get("document")
        total = sums.setdefault(("sample", row["sample"]) if document is None else str(document), [0.0, 0])
        total[0] += row["score"] - other["score"]
        total[1] += 1
    table = np.array(list(sums.values()))
    drawn = _draws(zlib.crc32(repr(place[:3]).encode()), len(table)) @ table
    means = drawn[:, 0] / drawn[:, 1]
    mean = float(table[:, 0].sum() / len(pairs))
    different = int(np.count_nonzero(np.abs(table[:, 0]) > 1e-9))
    return _Resampled(_difference(mean, means, (len(pairs), len(table), different, 1)), means)


def _over_tasks(several: Sequence[_Resampled]) -> Difference:
    parts = [each.difference for each in several]
    counts = (sum(each.n for each in parts), sum(each.clusters for each in parts),
              sum(each.different for each in parts), len(parts))  # fmt: skip
    mean = sum(each.mean for each in parts) / len(parts)
    return _difference(mean, np.mean([each.means for each in several], axis=0), counts)


def _difference(mean: float, means: np.ndarray, counts: tuple[int, int, int, int]) -> Difference:
    low, high = np.percentile(means, [2.5, 97.5])
    beyond = min(np.count_nonzero(means <= 1e-12), np.count_nonzero(means >= -1e-12))
    p = min(1.0, 2 * (beyond + 1) / (len(means) + 1))
    return Difference(mean, float(low), float(high), float(p), *counts)


@lru_cache(64)
def _draws(seed: int, count: int) -> np.ndarray:
    """Count how often each of `count` clusters is drawn, [RESAMPLES, count]; the same for all settings."""
    drawn = np.random.default_rng([_SEED, seed]).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn.astype(np.float32)
