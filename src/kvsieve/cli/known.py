"""Methods by name without importing them: a table that is shipped, so that a typo costs no import of torch.

The registry answers instead where it knows more: where it is loaded already, and where other packages bring methods.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import kvsieve
from kvsieve.budget import Budget
from kvsieve.loading import BUILT_IN, ENTRY_POINTS, canonical
from kvsieve.registry import MethodInfo, method_info
from kvsieve.suggestions import check_names, role_error, unknown_method

TABLE = Path(__file__).parent.parent / "methods" / "table.json"


@dataclass(frozen=True)
class ListedMethod:
    """A method as the shipped table lists it: its name, its roles, and its parameters with their defaults."""

    name: str
    roles: tuple[str, ...]
    parameters: Mapping[str, Any]


def method_rows() -> list[dict[str, Any]]:
    """Return what `kvsieve methods` prints of every method, JSON-ready."""
    return _shipped() if _suffices() else made_rows()


def made_rows() -> list[dict[str, Any]]:
    """Return the rows of all methods as the registry has them, JSON-ready."""
    return json.loads(json.dumps([_row(name) for name in kvsieve.list_methods()], default=str))


def known_method(name: str) -> MethodInfo | ListedMethod:
    """Return a method by name. Raises PlanError with a suggestion where there is none."""
    if not _suffices():
        return method_info(name)
    rows = {canonical(row["name"]): row for row in _shipped()}
    row = rows.get(canonical(name))
    if row is None:
        raise unknown_method(name, [each["name"] for each in rows.values()])
    return ListedMethod(row["name"], tuple(row["roles"]), row["parameters"])


def check_written(name: str, given: Mapping[str, Any]) -> MethodInfo | ListedMethod:
    """Return the method of a name, its parameters' names and its budget checked; values are checked by its plan.

    Raises PlanError.
    """
    info = known_method(name)
    check_names(info.name, info.parameters, given)
    if given.get("budget") is not None:
        Budget.parse(given["budget"])
    return info


def check_part(role: str, name: str, given: Mapping[str, Any]) -> None:
    """Raise PlanError for what is no method of this one role, "codec" or "prefill", or has other parameters."""
    info = check_written(name, given)
    if info.roles != (role,):
        raise role_error(info.name, role, [row["name"] for row in method_rows() if row["roles"] == [role]])


def _suffices() -> bool:
    """Return True where the shipped table has all methods."""
    return BUILT_IN not in sys.modules and not _brought()


@functools.cache
def _brought() -> bool:
    return bool(metadata.entry_points(group=ENTRY_POINTS))


@functools.cache
def _shipped() -> list[dict[str, Any]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def _row(name: str) -> dict[str, Any]:
    info = kvsieve.method_info(name)
    return {
        "name": info.name,
        "title": info.title,
        "summary": info.summary,
        "roles": list(info.roles),
        "phase": info.phase,
        "query_aware": info.query_aware,
        "storage": info.storage,
        "paper": info.paper,
        "parameters": {
            key: str(value) if isinstance(value, Budget) else value for key, value in info.parameters.items()
        },
    }
