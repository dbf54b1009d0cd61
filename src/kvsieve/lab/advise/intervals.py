"""Prediction intervals of the mean loss over other documents."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

LEVEL = 0.95
# Losses smaller than this are rounding; a sample's loss is hardly ever larger than that, in nats per token.
FLOOR = 1e-4
MOST = 8.0
# Prior of the logarithms' standard deviation in a task, and its weight in degrees of freedom: in evaluations of two
# models it was between 0.6 and 2.3.
SPREAD = 1.5
BELIEF = 2
_DRAWS = 4000


def prediction_interval(
    groups: Sequence[Sequence[float]], spread: Sequence[Sequence[float]] | None = None
) -> tuple[float, float, float]:
    """Return the mean loss, and the interval expected for the mean over as many other documents.

    Groups have equal weight. Losses of a group are taken as log-normal, with their own centre and spread, estimated
    from few samples: means of other documents are drawn with this uncertainty, and the interval is between their
    quantiles. `benchmarks/answers/advise_replay.py` measures its coverage.

    Args:
        groups: losses by task, of documents not used to choose the plan.
        spread: losses by task to estimate centre and spread from, at least 2 of each (default: `groups`).

    Returns:
        The mean and the interval's ends.
    """
    mean = fmean(fmean(group) for group in groups)
    if mean <= 0:
        return 0.0, 0.0, FLOOR
    random = np.random.default_rng(0)
    drawn = np.zeros(_DRAWS)
    for group, known in zip(groups, spread or groups, strict=True):
        logs = np.log(np.maximum(known, FLOOR))
        freedom = len(logs) - 1 + BELIEF
        squares = ((logs - logs.mean()) ** 2).sum() + BELIEF * SPREAD**2
        sigma = np.sqrt(squares / random.chisquare(freedom, _DRAWS))
        centre = logs.mean() + sigma / len(logs) ** 0.5 * random.standard_normal(_DRAWS)
        fresh = centre[:, None] + sigma[:, None] * random.standard_normal((_DRAWS, len(group)))
        drawn += np.exp(np.minimum(fresh, np.log(MOST))).mean(1) / len(groups)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return mean, min(max(float(low) - FLOOR, 0.0), mean), max(float(high) + FLOOR, mean)
