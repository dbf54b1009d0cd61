"""Settings in which compared methods differ although only the methods should."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsieve.errors import KvsieveWarning
from kvsieve.eval.cells import MethodSetting
from kvsieve.loading import BUILT_IN, REGISTERED, canonical

# Parameters that come with a model or a paper, and that decide more than many a method does.
COMPARED = ("window", "kernel", "pooling")


def warn_unlike(settings: Sequence[MethodSetting]) -> None:
    """Warn (KvsieveWarning) where compared methods run with unlike settings."""
    found = unlike_settings(settings)
    if found:
        warnings.warn(
            f"compared methods run with unlike settings: {'; '.join(found)}; give both the same values where only the "
            "methods should differ",
            KvsieveWarning,
            stacklevel=2,
        )


def unlike_settings(settings: Sequence[MethodSetting]) -> list[str]:
    """Return a clause for each parameter in which a method has no value in common with the first one.

    Two methods of kvsieve that both have their own defaults, or what came with the model, differ by design and are
    left out.
    """
    methods: dict[str, list[MethodSetting]] = {}
    for each in settings:
        if each.plan.roles:
            methods.setdefault(each.method, []).append(each)
    found = []
    first = next(iter(methods), "")
    for method, own in methods.items():
        for name in COMPARED:
            here, there = (parameter_values([each.parameters for each in some], name) for some in (methods[first], own))
            chosen = any(_is_chosen(each, name) for each in (*methods[first], *own))
            if chosen and here and there and not set(here) & set(there):
                found.append(f"{name} is {' or '.join(here)} in {first} and {' or '.join(there)} in {method}")
    return found


def parameter_values(parameters: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """Return the values that a parameter, or that of a wrapper's base, has among those of several settings."""
    found = (each.get(name, each.get(f"base.{name}")) for each in parameters)
    return list(dict.fromkeys(str(value) for value in found if value is not None))


def _is_chosen(setting: MethodSetting, name: str) -> bool:
    """Tell whether a value was given, came with ``paper=True``, or is of a method that is not kvsieve's."""
    ours = REGISTERED.get(canonical(setting.method), "").startswith(BUILT_IN)
    return not ours or name in setting.given or bool(setting.given.get("paper"))
