"""Checks of methods' parameters against their annotations.

`plan` checks functions that make plans, `Checked` the classes of roles.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self, Union

from kvsieve.errors import PlanError, short

# Columns of a cache are counted in int32, so no number of tokens is larger.
MOST = 2**31 - 1
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
}


class Checked:
    """Base of role classes, which are dataclasses: checks the arguments first."""

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        check_kinds(cls.__name__, cls, arguments)
        return super().__new__(cls)


def check_kinds(owner: str, annotated: Any, arguments: Mapping[str, Any]) -> None:
    """Check arguments against annotations.

    Annotations of int, float, bool, str, None and Literal are checked; others (budgets, lists, roles) are checked where
    the value is used.

    Args:
        owner: the callee, for the message.
        annotated: the function or class with the annotations.
        arguments: by name.

    Raises:
        PlanError: a value does not match its annotation.
    """
    kinds = _kinds(annotated)
    for name, value in arguments.items():
        allowed = kinds.get(name)
        if allowed is None or any(_fits(value, kind) for kind in allowed):
            continue
        words = [_WORDS[kind] if kind in _WORDS else f"one of {', '.join(map(repr, kind))}" for kind in allowed]
        large = isinstance(value, int) and not isinstance(value, bool) and (int in allowed or float in allowed)
        limit = f" of at most {MOST}" if large else ""
        raise PlanError(f"{owner}: {name} must be {' or '.join(words)}{limit}, got {short(value)}")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(type(value) is type(choice) and value == choice for choice in kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
    if kind is float:
        # NaN fails every comparison.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and abs(value) <= (sys.float_info.max if isinstance(value, float) else MOST)
    return isinstance(value, kind)


@functools.cache
def _kinds(annotated: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types, or tuple of choices, of each parameter that can be checked."""
    try:
        hints = typing.get_type_hints(annotated)
    except NameError:
        # Names for type checkers only.
        return {}
    found = {name: _parts(hint) for name, hint in hints.items()}
    return {name: parts for name, parts in found.items() if parts is not None}


def _parts(hint: Any) -> tuple[Any, ...] | None:
    """Return the kinds of one annotation; None if one of them is not checked here."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        parts = [_parts(kind) for kind in typing.get_args(hint)]
        return None if None in parts else tuple(kind for part in parts if part is not None for kind in part)
    if origin is Literal:
        return (typing.get_args(hint),)
    return (hint,) if hint in _WORDS else None


def inherited_fields(kind: type[Any], base: type[Any]) -> frozenset[str]:
    """Return the fields of a dataclass that it inherits from `base` without redeclaring them."""
    of_base = base.__dataclass_fields__
    return frozenset(name for name, field in kind.__dataclass_fields__.items() if field is of_base.get(name))
