"""Tool calls as Kimi K2 writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.lark import Rules, parameters_of
from kvsieve.serve.parsers.steps import NamedParser

_CALLS = "<|tool_calls_section_begin|>"
_CALLS_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEAD = re.compile(
    rf"{re.escape(_CALL)}\s*"
    rf"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*{re.escape(_ARGUMENTS)}\s*"
)


@dataclass(frozen=True)
class KimiCalls(CallForm):
    """Calls between Kimi's marks: an id such as `functions.NAME:0`, which the template needs again, and JSON."""

    controls = (_CALLS, _CALLS_END, _CALL, _CALL_END, _ARGUMENTS)

    def parser(self) -> AnswerParser:
        return NamedParser(_CALL, _HEAD, (_CALL_END, _CALLS_END), _CALLS)

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        calls = []
        number = rules.rule("/[0-9]{1,3}/")
        for tool in tools:
            head = rules.text(f"{_CALL}functions.{tool['function']['name']}:")
            schema = rules.json(parameters_of(tool))
            calls.append(rules.rule(f"{head} {number} {rules.text(_ARGUMENTS)} {schema} {rules.text(_CALL_END)}"))
        return f"{rules.text(_CALLS)} {rules.any_of(calls)}{'+' if several else ''} {rules.text(_CALLS_END)}"
