"""Tool calls as JSON objects: between marks, or bare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvsieve.serve.parsers.form import AnswerParser, CallForm
from kvsieve.serve.pieces import CallArguments, CallBegin, Piece, Text, new_id

MARK = "<tool_call>"
_END = "</tool_call>"
# Name and arguments of a call.
Found = tuple[str, str]


@dataclass(frozen=True)
class MarkedCalls(CallForm):
    """Calls as Hermes and Qwen write them: a JSON object between `<tool_call>` and `</tool_call>`."""

    def parser(self) -> AnswerParser:
        return _MarkedParser()


@dataclass(frozen=True)
class BareCalls(CallForm):
    """Calls as Llama 3 writes them: an answer that is only a JSON object. names: of tools that it may call."""

    names: frozenset[str]

    def parser(self) -> AnswerParser:
        return _BareParser(self.names)


class _MarkedParser(AnswerParser):
    def __init__(self) -> None:
        self._held = ""
        self._calls = 0

    def add(self, text: str, last: bool = False) -> list[Piece]:
        self._held += text
        if not last:
            at = self._held.find(MARK)
            if at > 0 and self._held[:at].strip():
                said = self._held[:at]
                self._held = self._held[at:]
                return [Text(said)]
            begun = self._held.lstrip()
            ends = any(self._held.endswith(MARK[:count]) for count in range(1, len(MARK)))
            if at >= 0 or ends or not begun:
                return []
            parts: list[str | Found] = [self._held]
        else:
            parts = list(_marked(self._held))
        self._held = ""
        if any(not isinstance(part, str) for part in parts):
            # Only line breaks lie around calls.
            parts = [part.strip() if isinstance(part, str) else part for part in parts]
        return [piece for part in parts if part for piece in self._pieces(part)]

    def _pieces(self, part: str | Found) -> list[Piece]:
        if isinstance(part, str):
            return [Text(part)]
        self._calls += 1
        return _call(self._calls - 1, part)


class _BareParser(AnswerParser):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = False

    def add(self, text: str, last: bool = False) -> list[Piece]:
        self._held += text
        begun = self._held.lstrip()
        if not (last or self._is_text) and (not begun or begun.startswith("{")):
            return []
        found = None if self._is_text else _object(self._held.strip())
        self._is_text = True
        held = self._held
        self._held = ""
        if last and found is not None and found["name"] in self._names and found.keys() & {"arguments", "parameters"}:
            return _call(0, _name_and_arguments(found))
        return [Text(held)] if held else []


def _marked(text: str) -> Iterator[str | Found]:
    at = 0
    while (begin := text.find(MARK, at)) >= 0:
        yield text[at:begin]
        at = begin + len(MARK)
        inside = text[at:].lstrip()
        start = len(text) - len(inside)
        try:
            _, size = json.JSONDecoder().raw_decode(inside)
            found = _object(inside[:size])
        except (ValueError, RecursionError):
            size = 0
            found = None
        behind = inside[size:].lstrip()
        if found is None or (behind and not behind.startswith(_END)):
            yield MARK
            continue
        yield _name_and_arguments(found)
        at = start + len(inside) - len(behind) + (len(_END) if behind else 0)
    yield text[at:]


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("name"), str) else None


def _name_and_arguments(found: dict[str, Any]) -> Found:
    arguments = found.get("arguments", found.get("parameters"))
    arguments = {} if arguments is None else arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return found["name"], text


def _call(number: int, call: Found) -> list[Piece]:
    name, arguments = call
    return [CallBegin(number, new_id(), name), CallArguments(number, arguments)]
