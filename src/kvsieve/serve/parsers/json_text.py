"""JSON that arrives in pieces: where a value ends, and how a call as an object begins."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
# What changes the state outside of a string; no JSON has "<" or "`" there, so the mark behind a broken value ends it.
_OUTSIDE = re.compile(r'["{}\[\]<`]')
_INSIDE = re.compile(r'["\\]')
_SCALAR = re.compile(r'[^\s,{}\[\]<"]+')
_ARGUMENTS = ("arguments", "parameters")


class JsonEnd:
    """Finds the end of a JSON value that arrives in pieces. It does not check the value.

    Attributes:
        ended: the value is complete.

    Args:
        depth: lists and objects that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self.ended = False
        self._depth = depth
        self._string = self._escaped = self._scalar = False

    def take(self, text: str) -> int:
        """Return how many characters of a text belong to the value, or are white space before it."""
        at = 0
        while at < len(text) and not self.ended:
            at = self._inside(text, at) if self._string else self._outside(text, at)
        return at

    def _inside(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _INSIDE.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found[0] == "\\"
        if found[0] == '"':
            self._string = False
            self.ended = not self._depth
        return found.end()

    def _outside(self, text: str, at: int) -> int:
        if not self._depth:
            return self._first(text, at)
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text)
        if found[0] in "<`":
            self.ended = True
            return found.start()
        self._change(found[0])
        return found.end()

    def _first(self, text: str, at: int) -> int:
        """Begin the value, or continue a number or the like."""
        if not self._scalar:
            space = _SPACE.match(text, at)
            at = at if space is None else space.end()
            if at == len(text):
                return at
            if text[at] in '{["':
                self._change(text[at])
                return at + 1
        found = _SCALAR.match(text, at)
        self._scalar = True
        end = at if found is None else found.end()
        self.ended = end < len(text)
        return end

    def _change(self, letter: str) -> None:
        if letter == '"':
            self._string = True
            return
        self._depth += 1 if letter in "{[" else -1
        self.ended = not self._depth


@dataclass
class Opening:
    """Begin of a call that is written as a JSON object.

    Attributes:
        name: of the function.
        end: place after the part that was read: before the arguments, or after the object.
        arguments: as JSON text, if the object is complete; None if they begin at `end`.
        named: the object has a member for arguments.
    """

    name: str = ""
    end: int = 0
    arguments: str | None = None
    named: bool = False
    members: dict[str, Any] = field(default_factory=dict)


def opening(text: str, at: int, names: Collection[str] | None = None) -> Opening | None:
    """Read the begin of a call, or return None if more text is needed.

    The call begins where its name is known and its arguments begin as an object, or at the end of the object.

    Args:
        text: with the object.
        at: its place.
        names: of functions that may be called; None for any.

    Raises:
        ValueError: the object is no call.
    """
    found = Opening()
    place = _expect(text, at, "{")
    while place is not None:
        member = _key(text, place)
        if member is None:
            return None
        key, start = member
        if key in _ARGUMENTS:
            found.named = True
            if found.name and text[start] == "{":
                found.end = start
                return found
        value = _value(text, start)
        if value is None:
            return None
        found.members[key], end = value
        if key == "name":
            found.name = _checked_name(found.members[key], names)
        place = _next(text, end)
        if place is not None and text[place - 1] == "}":
            return _complete(found, place)
    return None


def _complete(found: Opening, end: int) -> Opening:
    if not found.name:
        raise ValueError("no name")
    values = [found.members[key] for key in _ARGUMENTS if key in found.members]
    arguments = {} if not values or values[0] is None else values[0]
    found.arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    found.end = end
    return found


def _checked_name(name: Any, names: Collection[str] | None) -> str:
    if not isinstance(name, str) or not name or (names is not None and name not in names):
        raise ValueError("no function's name")
    return name


def _expect(text: str, at: int, letter: str) -> int | None:
    """Return the place after white space and a letter; None if more text is needed."""
    at = _behind_space(text, at)
    if at == len(text):
        return None
    if text[at] != letter:
        raise ValueError(f"no {letter!r}")
    return at + 1


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _key(text: str, at: int) -> tuple[str, int] | None:
    """Return a member's name and the place of its value."""
    start = _expect(text, at, '"')
    if start is None:
        return None
    name = _STRING.match(text, start - 1)
    if name is None:
        return None
    behind = _expect(text, name.end(), ":")
    place = len(text) if behind is None else _behind_space(text, behind)
    return None if place == len(text) else (json.loads(name[0]), place)


def _value(text: str, at: int) -> tuple[Any, int] | None:
    """Return a member's value and the place after it."""
    end = JsonEnd()
    size = end.take(text[at:])
    if not end.ended:
        return None
    try:
        return json.loads(text[at : at + size]), at + size
    except RecursionError as error:
        raise ValueError("too deep") from error


def _next(text: str, at: int) -> int | None:
    """Return the place after the comma or the brace that follows a member."""
    at = _behind_space(text, at)
    if at == len(text):
        return None
    if text[at] not in ",}":
        raise ValueError("no member follows")
    return at + 1
