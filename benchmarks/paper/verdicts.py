"""Verdicts on what a paper claims, by stated rules: intervals of 95%, bootstrap over samples.

A comparison is one of differences between two settings on the same samples. "better": the interval lies above 0;
"no worse": above minus a margin. It did not come out where the interval lies below 0 (for "no worse", where all of it
is worse and it reaches below the margin too). Between these, and with
fewer than 10 samples, it is undecided.
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
_DRAWS = 4000


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


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and bootstrap interval, resampling the values; None of fewer than two."""
    if len(values) < 2:
        return None
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(array), size=(_DRAWS, len(array)))
    low, high = np.percentile(array[drawn].mean(1), [2.5, 97.5])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def paired(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> Estimate | None:
    """The difference of two settings on the samples that both have."""
    return estimate([ours[key] - theirs[key] for key in ours if key in theirs])


def apart(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """The difference of the means of two sets of samples, each resampled by itself."""
    if min(len(ours), len(theirs)) < 2:
        return None
    random = np.random.default_rng(0)
    means = []
    for values in (ours, theirs):
        array = np.asarray(values, float)
        means.append(array[random.integers(len(array), size=(_DRAWS, len(array)))].mean(1))
    low, high = np.percentile(means[0] - means[1], [2.5, 97.5])
    mean = float(np.mean(ours) - np.mean(theirs))
    return Estimate(mean, float(low), float(high), min(len(ours), len(theirs)))


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
