"""Tool calls as DeepSeek V3, R1 and V3.1 write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.lark import Rules, parameters_of
from kvsieve.serve.parsers.steps import NamedParser

_CALLS = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_BETWEEN = "<｜tool▁sep｜>"
_FENCE = "```"
_HEAD = re.compile(rf"{_CALL}\s*(?P<name>[^\s<]+)\s*{_BETWEEN}\s*")
_FENCED = re.compile(rf"{_CALL}\s*function{_BETWEEN}(?P<name>[^\s<]+)\s*{_FENCE}(?:json)?\s*")


@dataclass(frozen=True)
class DeepSeekCalls(CallForm):
    """Calls between DeepSeek's marks: a name, and JSON after it.

    Attributes:
        fenced: as V3 and R1 write it: the word `function` before the name, and JSON in a fence.
    """

    fenced: bool = False
    controls = (_CALLS, _CALLS_END, _CALL, _CALL_END, _BETWEEN)

    def parser(self) -> AnswerParser:
        return NamedParser(_CALL, _FENCED if self.fenced else _HEAD, (_FENCE, _CALL_END, _CALLS_END), _CALLS)

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        calls = []
        for tool in tools:
            name = tool["function"]["name"]
            head = f"function{_BETWEEN}{name}\n{_FENCE}json\n" if self.fenced else f"{name}{_BETWEEN}"
            tail = f"\n{_FENCE}{_CALL_END}" if self.fenced else _CALL_END
            calls.append(rules.rule(f"{rules.text(_CALL + head)} {rules.json(parameters_of(tool))} {rules.text(tail)}"))
        call = rules.any_of(calls)
        between = f"{rules.text(chr(10))} " if self.fenced else ""
        more = f" ({between}{call})*" if several else ""
        return f"{rules.text(_CALLS)} {call}{more} {rules.text(_CALLS_END)}"
