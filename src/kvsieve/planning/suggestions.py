"""Errors about wrong names of methods and parameters, with suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kvsieve.errors import PlanError, short


def unknown_method(name: str, known: list[str]) -> PlanError:
    """Return the error for an unknown method's name."""
    return PlanError(f"unknown method {short(name)}{did_you_mean(name, known)}")


def role_error(name: str, role: str, known: list[str]) -> PlanError:
    """Return the error for a method without the role; `known` are those with it."""
    return PlanError(f"{name} is no {role}; {role}s are {', '.join(known)}")


def check_names(owner: str, known: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise PlanError with a suggestion for a parameter unknown to the method `owner`."""
    for name, value in arguments.items():
        if name == "compression_ratio" and "budget" in known:
            share = isinstance(value, float) and 0 <= value < 1
            example = f"compression_ratio={value:g} is budget='{100 * (1 - value):g}%'" if share else "budget='20%'"
            raise PlanError(
                f"{owner} has no parameter 'compression_ratio', the share that is dropped: give budget=, the share "
                f"that is kept; {example}"
            )
        if name not in known:
            raise PlanError(f"{owner} has no parameter {name!r}{did_you_mean(name, list(known), 'it takes')}")


def did_you_mean(name: str, known: list[str], lead: str | None = "known are") -> str:
    """Return the end of a message about a wrong name: the closest known one, and all after `lead`, if any."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    suggestion = f"; did you mean {close[0]!r}?" if close else ""
    if lead is None:
        return suggestion
    listing = f" ({lead} {', '.join(known)})" if known else f" ({lead} no parameters)"
    return suggestion + listing
