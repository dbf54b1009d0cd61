"""Arrays of layers and heads among the fields of roles."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from kvsieve.errors import PlanError
from kvsieve.planning.profiles import numbers


def set_numbers(role: object, name: str, form: str) -> None:
    """Replace a field by tuples of its numbers, or raise PlanError. form: its levels, such as "[layers][heads]"."""
    try:
        object.__setattr__(role, name, numbers(vars(role)[name], form.count("[")))
    except (TypeError, ValueError) as error:
        raise PlanError(f"{type(role).__name__}: {name} must be numbers, {form}: {error}") from error


def check_heads(
    role: object,
    what: str,
    array: Sequence[Sequence[float | Sized]],
    layers: int,
    heads: int,
    more: int | None = None,
    how: str = "",
) -> None:
    """Raise PlanError unless an array is of `layers` layers with `heads` (or `more`) heads each.

    what: its name in the message. how: the end of the message, after "calibrate this model".
    """
    if len(array) == layers and {len(layer) for layer in array} <= {heads, more}:
        return
    raise PlanError(
        f"{type(role).__name__} has {what} of {len(array)} layers with {len(array[0]) if array else 0} heads each, the "
        f"model has {layers} with {heads} KV heads: calibrate this model{how}"
    )
