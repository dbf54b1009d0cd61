"""Methods and codecs in text form: ``snapkv:kernel=21:window=16``, separated by commas.

A colon or a semicolon precedes each parameter; shells need quotes around a semicolon. A colon that no ``name=`` follows
belongs to the value, such as a file's name.
"""

from __future__ import annotations

import re
from typing import Any

from kvsieve.errors import PlanError

_PARAMETER = re.compile(r";|:(?=\s*[A-Za-z_][\w-]*\s*=)")


def split_specs(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and parameters of a list like ``full,snapkv:kernel=21:window=16``; names may be unknown ones.

    Raises PlanError for a malformed parameter.
    """
    specs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        method, _, settings = part.partition(":")
        specs.append(
            (method.strip(), parse_settings([setting for setting in _PARAMETER.split(settings) if setting.strip()]))
        )
    return specs


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Return the parameters of texts ``name=value``. Raises PlanError for a malformed one."""
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise PlanError(f"a parameter is written name=value, e.g. tsp_rate=0.2, got {pair!r}")
        name = name.strip().replace("-", "_")
        if name in parameters:
            raise PlanError(f"{name} is given twice, as {name}={parameters[name]} and {pair.strip()}; leave one out")
        parameters[name] = _value(value.strip())
    return parameters


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
