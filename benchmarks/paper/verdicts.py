"""Verdicts on what a paper claims, by stated rules: intervals of 95% that few or identical samples widen.

A comparison is one of differences between two settings on the same samples. "better": the interval lies above 0;
"no worse": above minus a margin, for which identical outcomes have to be 73 where the margin is 0.05. It did not come
out where the interval lies below 0 (for "no worse", and reaches below the margin). Between these, and with fewer than
10 samples, it is undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsieve.report.tables import markdown_table

OUT, NOT, OPEN, IMPOSSIBLE, LATER = "came out", "did not come out", "undecided", "cannot be tested here", "not run yet"
MARGIN = 0.05
FEW, LEAST = 50, 10
# Bounds of a difference of two scores.
SCORES = (-1.0, 1.0)
_DRAWS = 10_000


@dataclass(frozen=True)
class Verdict:
    """A claim and what became of it. abstract: of the paper's abstract, otherwise of a figure or table."""

    claim: str
    paper: str
    verdict: str
    evidence: str = ""
    rule: str = ""
    abstract: bool = False


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        few = "" if self.n >= FEW else ", few"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}], n={self.n}{few}"


def estimate(values: Sequence[float], within: tuple[float, float] | None = SCORES) -> Estimate | None:
    """Return the mean and its 95% interval; None of fewer than two values.

    Values that lie within bounds have Gaffke's interval: means under random weights of the values and, for the lower
    end, of one more at the lower bound, for the upper end at the upper one. Of outcomes that are 0 or 1 it is Clopper
    and Pearson's. Without bounds it is Student's t.

    Args:
        values: one for each sample.
        within: the least and the greatest value that a sample could have; None where none are known.
    """
    if len(values) < 2:
        return None
    low, high = _ends(np.asarray(values, float), within)
    return _estimated(float(np.mean(values)), low, high, len(values))


def paired(
    ours: Mapping[Any, float], theirs: Mapping[Any, float], within: tuple[float, float] | None = SCORES
) -> Estimate | None:
    """Return the difference of two settings on the samples that both have; within: bounds of such a difference."""
    return estimate([ours[key] - theirs[key] for key in ours if key in theirs], within)


def apart(ours: Sequence[float], theirs: Sequence[float], within: tuple[float, float] | None) -> Estimate | None:
    """Return the difference of the means of two sets of samples; within: bounds of a value, None without any."""
    n = min(len(ours), len(theirs))
    if n < 2:
        return None
    (low, high), (other_low, other_high) = (
        _ends(np.asarray(values, float), within, seed) for seed, values in enumerate((ours, theirs))
    )
    mean = float(np.mean(ours) - np.mean(theirs))
    return _estimated(mean, low - other_high, high - other_low, n)


def _ends(values: np.ndarray, within: tuple[float, float] | None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw means that the samples allow, [_DRAWS]: from below, for the interval's lower end, and from above."""
    random, n = np.random.default_rng(seed), len(values)
    if within is None:
        error = values.std(ddof=1) / n**0.5 if np.ptp(values) else 0.0
        means = values.mean() + error * random.standard_t(n - 1, _DRAWS)
        return means, means
    weights = random.dirichlet(np.ones(n + 1), _DRAWS)
    least, most = min(within[0], values.min()), max(within[1], values.max())
    return weights @ np.append(values, least), weights @ np.append(values, most)


def _estimated(mean: float, low: np.ndarray, high: np.ndarray, n: int) -> Estimate:
    if np.ptp(low) == 0:
        # Equal values without bounds say nothing of how far others would be.
        return Estimate(mean, -np.inf, np.inf, n)
    return Estimate(mean, float(np.quantile(low, 0.025)), float(np.quantile(high, 0.975)), n)


def better(found: Estimate | None) -> str:
    if found is None:
        return LATER
    return OPEN if found.n < LEAST else OUT if found.low > 0 else NOT if found.high < 0 else OPEN


def no_worse(found: Estimate | None, margin: float = MARGIN) -> str:
    if found is None:
        return LATER
    return OPEN if found.n < LEAST else OUT if found.low > -margin else NOT if found.high < 0 else OPEN


def all_of(verdicts: Sequence[str]) -> str:
    """Of a claim that says "in all cases"."""
    seen = [each for each in verdicts if each != LATER]
    if not seen:
        return LATER
    return NOT if NOT in seen else OUT if set(seen) == {OUT} else OPEN


def better_in(name: str, found: Estimate | None) -> str:
    return f"{name}: {found}" if found is not None else ""


def compared(
    claim: str, paper: str, cases: Mapping[str, Estimate | None], *, margin: float | None = None, abstract: bool = False
) -> Verdict:
    """A verdict on differences, one or several cases of one claim. margin: None for "better"."""
    judge = better if margin is None else lambda found: no_worse(found, margin)
    rule = "difference above 0" if margin is None else f"difference above -{margin:g}"
    evidence = "; ".join(filter(None, (better_in(name, found) for name, found in cases.items())))
    return Verdict(claim, paper, all_of([judge(found) for found in cases.values()]), evidence, rule, abstract)


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    head = ["claim", "the paper", "verdict", "here", "rule"]
    rows = [
        [("abstract: " if each.abstract else "") + each.claim, each.paper, each.verdict, each.evidence, each.rule]
        for each in verdicts
    ]
    return markdown_table(head, rows) + "\n"
