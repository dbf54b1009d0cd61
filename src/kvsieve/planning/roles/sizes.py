"""Budgets among the fields of roles: conversion of bytes to entries, and floors of shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kvsieve.planning.budget import Budget
from kvsieve.planning.roles.base import Role
from kvsieve.planning.roles.propagator import Propagator

R = TypeVar("R", bound=Role)


def parts_of(role: Role) -> Iterator[Role]:
    """Yield a role, and those that it wraps."""
    yield role
    for value in _fields(role).values():
        if isinstance(value, Role):
            yield from parts_of(value)


def budgets_of(role: Role | None) -> Iterator[Budget]:
    """Yield the budgets of a role, including those of a wrapped one, without those of answers."""
    for name, value in _fields(role).items():
        if isinstance(value, Budget) and name != "answer":
            yield value
        elif isinstance(value, Role):
            yield from budgets_of(value)


def byte_budgets(role: Role | None) -> Iterator[Budget]:
    """Yield the budgets in bytes of a role, including those of a wrapped one."""
    return (budget for budget in budgets_of(role) if budget.bytes is not None)


def with_entries(role: R, entries: Callable[[Budget], int]) -> R:
    """Return a role with budgets in bytes converted to entries; itself if it has none.

    Args:
        role: any.
        entries: returns the entries allowed by a budget in bytes.

    Raises:
        PlanError: the role cannot work with so few.
    """
    return _changed(role, lambda budget: budget if budget.bytes is None else Budget(tokens=entries(budget)))


def with_floor(role: R, floor: int) -> R:
    """Return a role with shares that keep at least `floor` entries; itself if unchanged.

    Raises:
        PlanError: the floor is no number of entries.
    """
    return _changed(role, lambda budget: budget.with_floor(floor))


def floor_of(role: Role | None) -> int:
    """Return the largest floor among the shares of a role, in entries."""
    own = role.floor if isinstance(role, Propagator) else 0
    return max((own, *(budget.floor for budget in budgets_of(role))))


def _changed(role: R, change: Callable[[Budget], Budget]) -> R:
    changed: dict[str, Any] = {}
    for name, value in _fields(role).items():
        new = value
        if isinstance(value, Budget):
            new = change(value)
        elif isinstance(value, Role):
            new = _changed(value, change)
        if new is not value:
            changed[name] = new
    return dataclasses.replace(role, **changed) if changed else role  # type: ignore[type-var]


def _fields(role: Role | None) -> dict[str, Any]:
    if role is None or not dataclasses.is_dataclass(role):
        return {}
    return {field.name: vars(role).get(field.name) for field in dataclasses.fields(role)}
