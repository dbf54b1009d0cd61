"""Tool calls as JSON objects: between marks as Hermes and Qwen write them, or bare as Llama 3 does."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.json_text import JsonEnd, Opening, opening
from kvsieve.serve.parsers.lark import Rules, parameters_of
from kvsieve.serve.parsers.steps import CallParser
from kvsieve.serve.pieces import Piece

_MARK = "<tool_call>"
_END = "</tool_call>"
_PYTHON = "<|python_tag|>"


@dataclass(frozen=True)
class MarkedCalls(CallForm):
    """Calls as Hermes and Qwen write them: a JSON object between `<tool_call>` and `</tool_call>`."""

    controls = (_MARK, _END)

    def parser(self) -> AnswerParser:
        return _MarkedParser()

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        call = rules.rule(f"{rules.text(_MARK + chr(10))} {an_object(rules, tools)} {rules.text(chr(10) + _END)}")
        more = rules.text("\n")
        return f"{call} ({more} {call})*" if several else call


@dataclass(frozen=True)
class BareCalls(CallForm):
    """Calls as Llama 3 writes them: an answer that is only a JSON object, or several with semicolons between.

    Attributes:
        names: of functions that may be called.
    """

    names: frozenset[str]
    controls = (_PYTHON,)

    def parser(self) -> AnswerParser:
        return _BareParser(self.names)

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        call = rules.rule(an_object(rules, tools, "parameters"))
        return f'{call} ("; " {call})*' if several else call


def an_object(rules: Rules, tools: Tools, key: str = "arguments") -> str:
    """Return the expression of a call of one of some tools as a JSON object. key: of the arguments."""
    calls = []
    for tool in tools:
        begin = f'{{"name": {json.dumps(tool["function"]["name"], ensure_ascii=False)}, "{key}": '
        calls.append(rules.rule(f'{rules.text(begin)} {rules.json(parameters_of(tool))} "}}"'))
    return rules.any_of(calls)


class ObjectParser(CallParser):
    """Parser of calls that are JSON objects.

    Args:
        names: of functions that may be called; None for any.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._rest = JsonEnd()

    def an_object(self, at: int, failed: int) -> list[Piece] | None:
        """Begin the call as an object in the buffer.

        Args:
            at: place of the object.
            failed: characters that are text if it is no call.
        """
        try:
            found = opening(self.held, at, self._names)
            taken = None if found is None else self.takes(found)
        except ValueError:
            return self.no_call(failed)
        if found is None or taken is None:
            return self.no_call(failed) if self.last else None
        pieces = self.begin(found.name, found.end)
        self._rest = JsonEnd(depth=1)
        if found.arguments is None:
            return self.json_arguments(pieces)
        self.step = self.behind_object
        return pieces + self.arguments(found.arguments)

    def takes(self, found: Opening) -> bool | None:
        """Return True for a call, or None if more text is needed. Raises ValueError for none."""
        return True

    def behind(self) -> list[Piece] | None:
        """Drop the rest of the object after its arguments."""
        self._taken(self._rest.take(self.held))
        if not (self._rest.ended or self.last):
            return None
        self.step = self.behind_object
        return []

    def behind_object(self) -> list[Piece] | None:
        """Continue after an object."""
        return super().behind()


class _MarkedParser(ObjectParser):
    marks = (_MARK,)
    ends = (_END,)

    def call(self) -> list[Piece] | None:
        return self.an_object(len(_MARK), len(_MARK))

    def takes(self, found: Opening) -> bool | None:
        """Take an object without arguments only if it is all that is between the marks."""
        if found.arguments is None:
            return True
        behind = self.held[found.end :].lstrip()
        if behind.startswith(_END) or (self.last and not behind):
            return True
        if _END.startswith(behind):
            return None
        raise ValueError("text is behind the object")


class _BareParser(ObjectParser):
    marks = (_PYTHON,)

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.step = self.start

    def start(self) -> list[Piece] | None:
        """Find out whether the answer begins with an object."""
        begun = self.held.lstrip()
        if not self.last and (not begun or (_PYTHON.startswith(begun) and begun != _PYTHON)):
            return None
        self.step = self.call if begun.startswith(("{", _PYTHON)) else self.text
        return self.said(len(self.held) - len(begun)) if self.step == self.call else []

    def call(self) -> list[Piece] | None:
        tag = len(_PYTHON) if self.held.startswith(_PYTHON) else 0
        return self.an_object(tag, tag or 1)

    def takes(self, found: Opening) -> bool | None:
        if not found.named:
            raise ValueError("an object with a name and no arguments may be the answer itself")
        return True

    def behind_object(self) -> list[Piece] | None:
        if not self.skip((";",)):
            return None
        self.step = self.start if self.held.startswith(("{", "<")) else self.text
        return []
