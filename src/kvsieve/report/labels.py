"""Names and order of plans in tables and pictures: full KV first, budgets from small to large."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FULL = "full"


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def budget_order(budget: str | None) -> tuple[int, float, str]:
    if budget is None:
        return (0, 0.0, "")
    try:
        return (1, float(budget[:-1]), "") if budget.endswith("%") else (2, float(budget), "")
    except ValueError:
        return (3, 0.0, budget)
