"""Shares of tokens among the parameters of joins."""

from __future__ import annotations

from kvsieve.errors import PlanError, short
from kvsieve.planning.budget import Budget
from kvsieve.planning.joins import Join


def parse_share(join: Join, name: str, value: float | str) -> float:
    """Return a share in (0, 1]. Raises PlanError for another value.

    join: that has the parameter. name: of the parameter. value: "15%" or 0.15.
    """
    try:
        ratio = Budget.parse(value).ratio
    except PlanError:
        ratio = None
    if ratio is None:
        raise PlanError(
            f"{type(join).__name__}: {name} must be a share of the tokens like '15%' or 0.15, got {short(value)}"
        )
    return ratio
