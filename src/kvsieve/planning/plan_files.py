"""Roles and records of a plan as JSON has them, and back."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from kvsieve.errors import PlanError, short
from kvsieve.planning.budget import Budget
from kvsieve.planning.loading import load_methods
from kvsieve.planning.roles import Loaded, role_class, role_name

R = TypeVar("R")


def as_json(value: Any) -> Any:
    """Return a role, its class under "type", or a field of one, as JSON has it."""
    if isinstance(value, Budget):
        return str(value)
    if isinstance(value, Loaded):
        return value.name
    if dataclasses.is_dataclass(value):
        fields = {part.name: as_json(getattr(value, part.name)) for part in dataclasses.fields(value)}
        return {"type": role_name(type(value)), **fields}
    return value


def read_role(name: str, value: Any) -> Any:
    """Return the inverse of `as_json` for the role `name`. Raises PlanError for no role class of this version."""
    return _made(name, value) if isinstance(value, dict) else value


def read_record(kind: type[R], value: Any) -> R:
    """Return a dataclass of its fields. Raises PlanError for others."""
    try:
        return kind(**value)
    except (TypeError, AttributeError) as error:
        raise PlanError(f"cannot read a plan with the {kind.__name__.lower()} {short(value)}: {error}") from error


def _made(name: str, value: dict[str, Any]) -> Any:
    kind = value.get("type")
    load_methods()
    role = role_class(str(kind))
    if role is None:
        raise PlanError(f"cannot read a plan with {name}={kind!r}: not a role class of this version of kvsieve")
    fields = {
        field: _made(field, part) if isinstance(part, dict) and "type" in part else part
        for field, part in value.items()
        if field != "type"
    }
    try:
        return role(**fields)
    except TypeError as error:
        raise PlanError(f"cannot read a plan with {name}={short(value)}: {error}") from error
