"""Means with 95% intervals and tests, for few samples, equal outcomes and shared documents.

`benchmarks/answers/coverage.py` measures the coverage of the intervals and the rate of false verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

LEVEL = 0.05
# Fewest samples, and fewest that differ, for a claim: 6 on one side have p = 2 / 2**6 = 0.031.
FEWEST = 10
FEWEST_DIFFERENT = 6
# Minimum and maximum of a difference of two scores.
SCORES = (-1.0, 1.0)
DRAWS = 10_000
# All signs are enumerated for at most so many non-zero values.
_ENUMERATED = 16
_SEED = 20_260_101
_Z = 1.959963984540054
_TINY = 1e-9


@dataclass(frozen=True)
class MeanEstimate:
    """A mean of samples, such as a difference of two settings on them.

    Attributes:
        mean: the mean; of several tasks, unweighted.
        low: lower end of the 95% interval.
        high: upper end of the 95% interval.
        p: two-sided, of a sign-flip test.
        n: samples.
        clusters: number of documents, or of samples without a shared one.
        different: clusters with a sum other than 0.
        tasks: tasks in the mean.
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
        """lower, higher, level, or few: too few samples, or too few that differ, for a claim."""
        if self.n < FEWEST or self.clusters < FEWEST_DIFFERENT:
            return "few"
        if self.low <= 0 <= self.high:
            return "level"
        if self.different < FEWEST_DIFFERENT:
            return "few"
        return "level" if self.p >= LEVEL else "lower" if self.mean < 0 else "higher"

    @property
    def chance(self) -> str:
        """Text of p after a verdict."""
        return next(f"p<{bound}" for bound in (0.001, 0.01, LEVEL, 2) if self.p < bound)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def estimate(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    tasks: Sequence[Hashable] | None = None,
    within: tuple[float, float] | None = SCORES,
) -> MeanEstimate:
    """Return the mean of samples, its 95% interval, and the p of a sign-flip test.

    The interval is Tango's if every value is -1, 0 or 1, samples have a document each and tasks have equal weights.
    Otherwise it is Student's over documents, with Satterthwaite's degrees of freedom over tasks; or Gaffke's, which
    allows for unseen outcomes, if fewer than `FEWEST_DIFFERENT` documents differ from the others.

    Args:
        values: one for each sample, at least one.
        clusters: the document of each sample; default: one each.
        tasks: the task of each sample; every task has the same weight in the mean.
        within: minimum and maximum of a sample's value; None if unknown: equal values then have no interval.
    """
    units = _Units.of(np.asarray(values, float), clusters, tasks)
    low, high = units.interval(within)
    different = int(np.count_nonzero(np.abs(units.parts) > _TINY / units.samples))
    counts = units.samples, len(units.parts), different, len(units.of_task)
    return MeanEstimate(units.mean, low, high, sign_flip(units.parts), *counts)


@dataclass(frozen=True)
class _Units:
    """Samples summed by task and document.

    Attributes:
        values: the samples' values, [N].
        sums: sum of a unit's samples, [U].
        sizes: number of a unit's samples, [U].
        parts: a unit's contribution to the mean, [U].
        of_task: the units of each task.
    """

    values: np.ndarray
    sums: np.ndarray
    sizes: np.ndarray
    parts: np.ndarray
    of_task: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, values: np.ndarray, clusters: Sequence[Hashable] | None, tasks: Sequence[Hashable] | None) -> _Units:
        own: Sequence[Hashable] = range(len(values))
        named = list(zip([0] * len(values) if tasks is None else tasks, clusters or own, strict=True))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(named))}
        owner = np.array([numbers[name] for name in named])
        sums = np.bincount(owner, values)
        sizes = np.bincount(owner).astype(float)
        known: dict[Hashable, list[int]] = {}
        for (task, _), number in numbers.items():
            known.setdefault(task, []).append(number)
        of_task = tuple(np.array(units) for units in known.values())
        parts = np.empty_like(sums)
        for units in of_task:
            parts[units] = sums[units] / sizes[units].sum() / len(of_task)
        return cls(values, sums, sizes, parts, of_task)

    @property
    def samples(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return float(self.parts.sum())

    @property
    def strata(self) -> tuple[np.ndarray, ...]:
        """Units of each task; of all tasks together if one has a single document, and so no spread."""
        return self.of_task if all(len(units) > 1 for units in self.of_task) else (np.arange(len(self.sums)),)

    def interval(self, within: tuple[float, float] | None) -> tuple[float, float]:
        means = np.round(self.sums / self.sizes, 9)
        if within == SCORES and self._are_pairs(means):
            return tango(int((self.values > 0).sum()), int((self.values < 0).sum()), self.samples)
        odd = sum(len(units) - np.unique(means[units], return_counts=True)[1].max() for units in self.strata)
        if within is not None and odd < FEWEST_DIFFERENT:
            return self._gaffke(within)
        half = self._student() if odd else math.inf
        low, high = within or (-math.inf, math.inf)
        return max(self.mean - half, low), min(self.mean + half, high)

    def _are_pairs(self, means: np.ndarray) -> bool:
        alike = len({self.sizes[units].sum() for units in self.of_task}) == 1
        return alike and self.sizes.max() == 1 and set(means) <= {-1.0, 0.0, 1.0}

    def _gaffke(self, within: tuple[float, float]) -> tuple[float, float]:
        weights = np.concatenate([self.sizes[units] / self.sizes[units].sum() for units in self.of_task])
        most = float(weights.max()) * len(self.parts) / len(self.of_task)
        low, high = gaffke(self.parts * len(self.parts), (within[0] * most, within[1] * most))
        return max(low, within[0]), min(high, within[1])

    def _student(self) -> float:
        """Return half the interval's width."""
        variances = []
        freedoms = []
        for units in self.strata:
            count = len(units)
            size = self.sizes[units].sum()
            errors = (self.sums[units] - self.sums[units].sum() / size * self.sizes[units]) / size / len(self.strata)
            variances.append(count / (count - 1) * float((errors**2).sum()))
            freedoms.append(count - 1)
        freedom = sum(variances) ** 2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True) if v)
        return student(round(freedom, 3)) * math.sqrt(sum(variances))


def share_interval(count: float, n: int) -> tuple[float, float]:
    """Return the Clopper-Pearson 95% interval of a share seen `count` times in n; its coverage is at least 95%."""
    low = 0.0 if count <= 0 else _root(lambda x: _beta(count, n - count + 1, x) - LEVEL / 2, 0.0, 1.0)
    high = 1.0 if count >= n else _root(lambda x: _beta(count + 1, n - count, x) - (1 - LEVEL / 2), 0.0, 1.0)
    return low, high


@lru_cache(1024)
def student(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t."""
    return _root(lambda t: LEVEL - _beta(freedom / 2, 0.5, freedom / (freedom + t * t)), 0.0, 1e3)


@lru_cache(4096)
def tango(better: int, worse: int, n: int) -> tuple[float, float]:
    """Return the score interval of a difference of paired shares (Tango, Statistics in Medicine 17, 1998).

    Args:
        better: pairs in which the first is 1 and the second 0.
        worse: pairs in which the first is 0 and the second 1.
        n: all pairs.
    """

    def score(delta: float) -> float:
        linear = (2 * n - better + worse) * delta - better - worse
        root = math.sqrt(max(linear**2 + 8 * n * worse * delta * (1 - delta), 0.0))
        variance = n * ((root - linear) / (2 * n) + delta * (1 - delta))
        gap = better - worse - n * delta
        return gap / math.sqrt(variance) if variance > _TINY else math.copysign(math.inf, gap)

    mean = (better - worse) / n
    low = -1.0 if worse == n else _root(lambda delta: _Z - score(delta), -1.0, mean)
    high = 1.0 if better == n else _root(lambda delta: -_Z - score(delta), mean, 1.0)
    return low, high


def gaffke(values: np.ndarray, within: tuple[float, float]) -> tuple[float, float]:
    """Return Gaffke's interval of a mean; for values 0 or 1 within (0, 1) it is Clopper-Pearson's.

    Its ends are quantiles of means under random weights of the values and of one more at the bound.
    """
    kinds, counts = np.unique(values, return_counts=True)
    random = np.random.default_rng(_SEED)
    ends = []
    for bound, quantile in ((min(within[0], kinds[0]), LEVEL / 2), (max(within[1], kinds[-1]), 1 - LEVEL / 2)):
        weights = random.standard_gamma(np.append(counts, 1), (DRAWS, len(counts) + 1))
        ends.append(float(np.quantile(weights @ np.append(kinds, bound) / weights.sum(1), quantile)))
    return ends[0], ends[1]


def sign_flip(values: np.ndarray) -> float:
    """Return the two-sided p of the sum of values under random signs.

    Exact if the non-zero values have equal magnitude, or are at most 16; otherwise from `DRAWS` draws with a fixed
    seed.
    """
    sizes = np.abs(values)
    sizes = sizes[sizes > _TINY * max(sizes.max(initial=0.0), _TINY)]
    if not len(sizes):
        return 1.0
    sizes = sizes / sizes.max()
    seen = abs(float(values.sum())) / float(np.abs(values).max())
    count = len(sizes)
    if np.ptp(sizes) < _TINY:
        # As of a coin's tosses; McNemar's exact test.
        heads = round((count + seen) / 2)
        return min(1.0, 2 * sum(math.comb(count, k) for k in range(heads, count + 1)) / 2**count)
    if count <= _ENUMERATED:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return float(np.mean(np.abs(sums) >= seen - _TINY))
    beyond = np.count_nonzero(np.abs(_signs(count) @ sizes) >= seen - 1e-6)
    return float((beyond + 1) / (DRAWS + 1))


@lru_cache(64)
def _signs(count: int) -> np.ndarray:
    """Draw signs, [DRAWS, count]; equal for all settings."""
    return np.random.default_rng([_SEED, count]).integers(0, 2, (DRAWS, count)).astype(np.float32) * 2 - 1


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a rising function."""
    for _ in range(60):
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction (Lentz)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    fraction = 1.0
    upper = 1.0
    lower = 0.0
    for step in range(400):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1 / (1 + term * lower)
        upper = 1 + term / upper
        change = upper * lower
        fraction *= change
        if step and abs(change - 1) < 1e-12:
            break
    return front * (fraction - 1)
