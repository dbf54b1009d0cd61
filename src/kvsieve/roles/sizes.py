"""Budgets in bytes among the fields of roles, found and made entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvsieve.budget import Budget
from kvsieve.roles.base import Role

R = TypeVar("R", bound=Role)


def byte_budgets(role: Role | None) -> Iterator[Budget]:
    """Yield the budgets in bytes that a role holds, those of what it wraps included."""
    for value in _fields(role).values():
        if isinstance(value, Budget) and value.bytes is not None:
            yield value
        elif isinstance(value, Role):
            yield from byte_budgets(value)


def with_entries(role: R, entries: Callable[[Budget], int]) -> R:
    """Return a role whose budgets in bytes have become numbers of entries; itself where there are none.

    Args:
        role: any.
        entries: gives those that a budget in bytes allows.

    Raises:
        PlanError: the role cannot work with so few.
    """
    changed: dict[str, Any] = {}
    for name, value in _fields(role).items():
        if isinstance(value, Budget) and value.bytes is not None:
            changed[name] = Budget(tokens=entries(value))
        elif isinstance(value, Role) and any(byte_budgets(value)):
            changed[name] = with_entries(value, entries)
    return dataclasses.replace(role, **changed) if changed else role  # type: ignore[type-var]


def _fields(role: Role | None) -> dict[str, Any]:
    if role is None or not dataclasses.is_dataclass(role):
        return {}
    return {each.name: vars(role).get(each.name) for each in dataclasses.fields(role)}
