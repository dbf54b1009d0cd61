"""Values of parameters that a template writes as plain text, typed by the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_NUMBERS = frozenset({"integer", "number"})


def kinds_of(schema: Any) -> frozenset[str] | None:
    """Return the types that a schema allows; None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset([declared])
    if isinstance(declared, list):
        return frozenset(filter(lambda kind: isinstance(kind, str), declared))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind, schema["enum"]))
    if "const" in schema:
        return frozenset([_kind(schema["const"])])
    parts = schema.get("anyOf", schema.get("oneOf"))
    found = [kinds_of(part) for part in parts] if isinstance(parts, list) else [None]
    known = [kinds for kinds in found if kinds is not None]
    return frozenset().union(*known) if known and len(known) == len(found) else None


def typed(text: str, kinds: frozenset[str] | None) -> str:
    """Return a value as JSON text: JSON of an allowed type as it is, other text as a string.

    Args:
        text: the value.
        kinds: allowed types; None for any.
    """
    bare = text.strip()
    if kinds is not None and "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower()
    try:
        kind = _kind(json.loads(bare, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    allowed = kinds is None or kind in kinds or (kind in _NUMBERS and "number" in kinds)
    return bare if allowed else json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _kind(value: Any) -> str:
    """Return the type of a JSON value, as schemas call it."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"
