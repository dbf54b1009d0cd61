"""Verdicts on what a paper claims, by stated rules. Intervals and tests are `kvsieve.lab.eval.intervals`'.

A case is a difference between two settings on the same samples of one length. It counts with at least `FEW` samples
in at least half of which the method acted.

- "better" came out where the interval is above 0, at least 6 samples differ and a sign-flip test has p < 0.05; it did
  not where a case's interval is below -margin for scores and shares, below 0 for other measures, with p < 0.05 over the
  number of cases.
- "no worse" came out where the interval is above -margin; it did not where the interval is below -margin.

Between these, and where no case counts for its samples, a claim is undecided. A claim whose cases are all refused
because the method did not act says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvsieve.lab.eval.intervals import FEWEST_DIFFERENT, LEVEL, SCORES, MeanEstimate, estimate
from kvsieve.report.tables import markdown_table

OUT, NOT, OPEN, IMPOSSIBLE, LATER = "came out", "did not come out", "undecided", "cannot be tested here", "not run yet"
MARGIN = 0.05
# Samples below which a case is shown and not counted.
FEW = 50
# The part of the samples in which a method has to act.
ACTED = 0.5


@dataclass(frozen=True)
class Verdict:
    """A claim and what became of it.

    Attributes:
        claim: What the paper says.
        paper: The paper's numbers.
        verdict: What came of it here.
        evidence: The numbers here.
        rule: What decides.
        abstract: Of the paper's abstract; otherwise of a figure or table.
        acted: Samples in which the method did something, of how many.
    """

    claim: str
    paper: str
    verdict: str
    evidence: str = ""
    rule: str = ""
    abstract: bool = False
    acted: str = ""


@dataclass(frozen=True)
class Case:
    """A difference between two settings.

    Attributes:
        found: The difference.
        acted: Samples in which the method did something; None where there is no method.
        margin: How far below 0 the interval has to be for "did not come out".
    """

    found: MeanEstimate
    acted: int | None = None
    margin: float = MARGIN

    @property
    def counts(self) -> bool:
        return self.found.n >= FEW

    @property
    def idle(self) -> bool:
        return self.acted is not None and self.acted < ACTED * self.found.n

    def __str__(self) -> str:
        one = self.found
        few = "" if self.counts else ", few: not counted"
        idle = f", acted in {self.acted}: not counted" if self.idle else ""
        return f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}], n={one.n}{few}{idle}"


def _margin(within: tuple[float, float] | None) -> float:
    """Return the margin of scores and shares, or 0 for other measures."""
    return MARGIN if within is not None and within[1] <= 1 else 0.0


def paired(
    ours: Mapping[Any, float],
    theirs: Mapping[Any, float],
    within: tuple[float, float] | None = SCORES,
    acts: Mapping[Any, bool] | None = None,
) -> Case | None:
    """Return the difference of two settings on the samples that both have; None of none.

    Args:
        ours: A value for each sample.
        theirs: The other setting's.
        within: Bounds of a difference, None without any.
        acts: Whether the method did something, for each sample; None where no method is judged.
    """
    both = [key for key in ours if key in theirs]
    if not both:
        return None
    found = estimate([ours[key] - theirs[key] for key in both], within=within)
    return Case(found, None if acts is None else sum(acts[key] for key in both), _margin(within))


def mean(values: Sequence[float], within: tuple[float, float] | None = SCORES) -> Case | None:
    """Return the mean of values that no method made; None of none."""
    return Case(estimate(values, within=within), None, _margin(within)) if values else None


def apart(
    ours: Sequence[float], theirs: Sequence[float], within: tuple[float, float] | None, acted: int | None = None
) -> Case | None:
    """Return the difference of the means of two sets of samples, by the intervals of both (Zou and Donner's MOVER).

    It has the smaller set's n, and is judged by its interval alone.

    Args:
        ours: One set's values.
        theirs: The other's.
        within: Bounds of a value, None without any.
        acted: Samples of the smaller set in which the method did something.
    """
    if not (ours and theirs):
        return None
    one, other = (estimate(values, within=within) for values in (ours, theirs))
    gap = one.mean - other.mean
    low = gap - math.hypot(one.mean - one.low, other.high - other.mean)
    high = gap + math.hypot(one.high - one.mean, other.mean - other.low)
    fewer = min(one, other, key=lambda each: each.n)
    return Case(replace(fewer, mean=gap, low=low, high=high, p=0.0, different=fewer.n), acted, _margin(within))


def better(case: Case, cases: int = 1) -> str:
    """Judge one of several cases of a claim."""
    found = case.found
    if found.verdict == "higher":
        return OUT
    return NOT if found.verdict == "lower" and found.high < -case.margin and found.p < LEVEL / cases else OPEN


def no_worse(case: Case, cases: int = 1) -> str:
    """Judge one of several cases of a claim."""
    return OUT if case.found.low > -MARGIN else NOT if case.found.high < -MARGIN else OPEN


_RULES = {better: "better: difference above 0", no_worse: f"no worse: difference above -{MARGIN:g}"}


def of_all(cases: Sequence[Case | None], judge: Callable[[Case, int], str]) -> tuple[str, str]:
    """Return the verdict of a claim that says "in all cases", and in how many samples the method acted."""
    ran = [case for case in cases if case is not None]
    known = [case for case in ran if case.acted is not None]
    acted = sum(case.acted or 0 for case in known)
    share = f"{acted} of {sum(case.found.n for case in known)}" if known else ""
    if not ran:
        return LATER, share
    active = [case for case in ran if case.counts and not case.idle]
    idle = [case for case in ran if case.counts and case.idle] or [case for case in ran if case.idle]
    if idle and not active:
        counts = sum(case.acted or 0 for case in idle), sum(case.found.n for case in idle)
        return "refused: acted in {} of {}".format(*counts), share
    seen = {judge(case, len(active)) for case in active}
    return NOT if NOT in seen else OUT if seen == {OUT} else OPEN, share


def compared(
    claim: str,
    paper: str,
    cases: Mapping[Any, Case | None],
    *,
    judge: Callable[[Case, int], str] = better,
    abstract: bool = False,
) -> Verdict:
    """Return the verdict on one or several cases of one claim, by `better` or `no_worse`."""
    evidence = "; ".join(f"{name}: {case}" for name, case in cases.items() if case is not None)
    verdict, acted = of_all(list(cases.values()), judge)
    return Verdict(claim, paper, verdict, evidence, _RULES[judge], abstract, acted)


def repeated(
    claim: str, paper: str, ratios: Mapping[int, Sequence[float]], rule: str, holds: Callable[[float], bool]
) -> Verdict:
    """Return the verdict on costs over another setting's: it takes `FEWEST_DIFFERENT` repeats that all agree.

    Args:
        claim: What the paper says.
        paper: The paper's numbers.
        ratios: Of each repeat, by length; the longest prompt's decide.
        rule: What decides, in words.
        holds: Whether a ratio is as claimed.
    """
    ran = {length: each for length, each in ratios.items() if each}
    shown = "; ".join(f"{length}: {median(each):.3f} in the median of {len(each)}" for length, each in ran.items())
    last = list(ratios.values())[-1] if ratios else []
    if not last:
        return Verdict(claim, paper, LATER, shown, rule, abstract=True)
    agree = {holds(ratio) for ratio in last}
    verdict = OPEN if len(last) < FEWEST_DIFFERENT or len(agree) > 1 else OUT if agree == {True} else NOT
    return Verdict(claim, paper, verdict, shown, rule, abstract=True)


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    head = ["claim", "the paper", "verdict", "acted", "here", "rule"]
    rows = [
        [
            ("abstract: " if each.abstract else "") + each.claim,
            each.paper,
            each.verdict,
            each.acted,
            each.evidence,
            each.rule,
        ]
        for each in verdicts
    ]
    return markdown_table(head, rows) + "\n"
