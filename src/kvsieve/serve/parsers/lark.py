"""Rules of a grammar in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.planning.grammars import Grammar, embedded

# JSON as templates write it, so that no answer is an endless run of white space.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
# Members of a schema that bound a string.
BOUNDS = ("minLength", "maxLength", "pattern")
# Longest strings for which a lexer can count letters and look for a mark at once.
_SHORT = 257
# Any text, as a terminal.
_ANY = "/(?s:.*)/"


class Rules:
    """Rules of a grammar, with numbered names.

    Args:
        controls: ids of the tokenizer's added tokens, by their text.
    """

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        self._lines: list[str] = []
        names = sorted(filter(None, controls), key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def text(self, text: str) -> str:
        """Return the expression of a text; added tokens that it spells are these tokens."""
        parts = [text] if self._marks is None else self._marks.split(text)
        named = [f"<[{self._controls[part]}]>" if part in self._controls else quoted(part) for part in parts if part]
        return " ".join(named) or '""'

    def json(self, schema: Any, definitions: Mapping[str, Any] | None = None) -> str:
        """Return the expression of JSON that matches a schema.

        Args:
            schema: an object, true or false.
            definitions: schema with the definitions that it refers to.
        """
        own = dict(schema) if isinstance(schema, Mapping) else {}
        shared = {name: definitions[name] for name in _DEFINITIONS if definitions and name in definitions}
        return self.rule(embedded({**shared, **own}, **_COMPACT))

    def until(self, end: str, text: str = _ANY) -> str:
        """Return the expression of a text up to a mark, and of the mark.

        Args:
            end: the mark.
            text: expression of a terminal; any text by default.
        """
        terminal = f"T{len(self._lines)}"
        self._lines.append(f"{terminal}: {text}")
        if end in self._controls:
            return f"{terminal} {self.text(end)}"
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}[suffix={quoted(end)}]: {terminal}")
        return name

    def string(self, schema: Mapping[str, Any], end: str) -> str:
        """Return the expression of a string within a schema's bounds, and of the mark after it.

        Args:
            schema: its lengths and its pattern are kept.
            end: the mark.

        Raises:
            InputError: lengths that are no numbers, or a pattern that is no regular expression.
        """
        least, most, pattern = (schema.get(name) for name in BOUNDS)
        if not all(bound is None or type(bound) is int for bound in (least, most)):
            raise InputError(f"the lengths of a schema are whole numbers, got {short(least)} and {short(most)}")
        if not (pattern is None or isinstance(pattern, str)):
            raise InputError(f"the pattern of a schema is a regular expression, got {short(pattern)}")
        parts = []
        if least or most is not None:
            parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
        if pattern is not None:
            parts.append(Grammar.regex(_anywhere(pattern)).symbol)
        if parts and end not in self._controls and (pattern is not None or (most or _SHORT) < _SHORT):
            # The first mark ends the string, whether that is within the bounds or not.
            parts.append(f"~({_ANY} {quoted(end.strip())} {_ANY})")
        return self.until(end, " & ".join(parts) or _ANY)

    def any_of(self, expressions: list[str]) -> str:
        """Return the expression of one of several."""
        return self.rule(" | ".join(expressions))

    def rule(self, expression: str) -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def grammar(self, start: str) -> str:
        """Return the grammar of an expression."""
        return "\n".join([f"start: {start}", *self._lines, ""])


def quoted(text: str) -> str:
    """Return a text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's parameters, an object without members that it does not name."""
    schema = dict(tool["function"].get("parameters") or {})
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def members_of(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the schemas of an object's members by name, and the names of those that it must have.

    Raises InputError for properties that are no object, and required names that are no list.
    """
    members = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(members, Mapping) or not isinstance(required, list):
        raise InputError(
            f"the properties of an object's schema are an object and `required` is a list of their names, got "
            f"{short(members)} and {short(required)}"
        )
    return members, required


def _anywhere(pattern: str) -> str:
    """Return a regular expression of whole texts in which a schema's pattern matches."""
    closed = pattern.endswith("$") and not pattern.endswith("\\$")
    before = "" if pattern.startswith("^") else "(?s:.*)"
    inside = pattern.removeprefix("^").removesuffix("$" if closed else "")
    return f"{before}(?:{inside})" + ("" if closed else "(?s:.*)")


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the schemas of which a value matches any, one for each type of several; None if there are none."""
    kinds = schema.get("type")
    if isinstance(kinds, list) and not {"enum", "const"} & schema.keys():
        return [{**schema, "type": kind} for kind in kinds] or None
    listed = schema.get("anyOf", schema.get("oneOf"))
    return listed if kinds is None and isinstance(listed, list) and listed else None


def options_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows; None if it does not list them. Raises InputError for no list."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if listed is not None and not (isinstance(listed, list) and listed):
        raise InputError(f"the `enum` of a schema is a list of values, got {short(listed)}")
    return listed
