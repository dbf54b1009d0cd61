"""Tool calls as Mistral's templates write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.lark import Rules, parameters_of
from kvsieve.serve.parsers.objects import ObjectParser, an_object
from kvsieve.serve.pieces import Piece

_CALLS = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_HEAD = re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]]+)\s*(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*")


@dataclass(frozen=True)
class MistralCalls(CallForm):
    """Calls after `[TOOL_CALLS]`: a list of JSON objects, or a name and its arguments. Both are parsed.

    Attributes:
        listed: the template writes a list.
    """

    listed: bool = True
    controls = (_CALLS, _ID, _ARGUMENTS)

    def parser(self) -> AnswerParser:
        return _MistralParser()

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        if self.listed:
            call = an_object(rules, tools)
            more = f' (", " {call})*' if several else ""
            return f'{rules.text(_CALLS + "[")} {call}{more} "]"'
        calls = []
        for tool in tools:
            head = rules.text(f"{_CALLS}{tool['function']['name']}{_ARGUMENTS}")
            calls.append(rules.rule(f"{head} {rules.json(parameters_of(tool))}"))
        return f"{rules.any_of(calls)}{'+' if several else ''}"


class _MistralParser(ObjectParser):
    marks = (_CALLS,)

    def __init__(self) -> None:
        super().__init__()
        self._listed = False

    def call(self) -> list[Piece] | None:
        inside = self.held[len(_CALLS) :].lstrip()
        if not inside and not self.last:
            return None
        self._listed = inside.startswith("[")
        if not self._listed:
            return self.named(_CALLS, _HEAD)
        return self.an_object(len(self.held) - len(inside) + 1, len(_CALLS))

    def behind(self) -> list[Piece] | None:
        return super().behind() if self._listed else self.behind_object()

    def behind_object(self) -> list[Piece] | None:
        if not self._listed:
            self.step = self.text
            return []
        if not self.skip((",",)):
            return None
        if self.held.startswith("]"):
            self._taken(1)
        self.step = self.next_object if self.held.startswith("{") else self.text
        return []

    def next_object(self) -> list[Piece] | None:
        """Begin a further call of the list."""
        return self.an_object(0, 1)
