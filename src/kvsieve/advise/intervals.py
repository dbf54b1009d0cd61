"""Intervals in which the mean loss over other documents is to be expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

LEVEL = 0.95
# Losses smaller than this are rounding.
FLOOR = 1e-4


def prediction_interval(
    groups: Sequence[Sequence[float]], spread: Sequence[Sequence[float]] | None = None, level: float = LEVEL
) -> tuple[float, float, float]:
    """Mean loss, and the interval for the mean over as many other documents.

    Means of groups count alike. The interval is one of Student's t for the logarithm of the ratio of two such means
    (losses are positive and skewed), with the degrees of freedom of Welch and Satterthwaite.

    Args:
        groups: losses by task, of documents that the plan was not chosen by.
        spread: losses by task that the variance is taken from, at least 2 of each; `groups` where left out.
        level: part of such sets whose mean the interval is to hold.

    Returns:
        The mean and the interval's ends.
    """
    mean = fmean(fmean(group) for group in groups)
    if mean <= 0:
        return 0.0, 0.0, FLOOR
    known = spread or groups
    # Of the mean that is known and of the one to come, which has as many samples.
    parts = [2 * variance(mine) / len(group) / len(groups) ** 2 for group, mine in zip(groups, known, strict=True)]
    total = sum(parts)
    if total <= 0:
        return mean, max(mean - FLOOR, 0.0), mean + FLOOR
    freedom = total**2 / sum(part**2 / (len(mine) - 1) for part, mine in zip(parts, known, strict=True))
    # Relative to the mean of the same samples: of skewed losses, one that is large makes both large.
    relative = math.sqrt(total) / fmean(fmean(mine) for mine in known)
    reach = math.exp(min(student(level, freedom) * relative, 20.0))
    return mean, max(mean / reach - FLOOR, 0.0), mean * reach + FLOOR


def student(level: float, freedom: float) -> float:
    """Two-sided quantile of Student's t, by the expansion around the normal one; within 3% from 2 degrees on."""
    z, n = NormalDist().inv_cdf((1 + level) / 2), max(freedom, 2.0)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
