"""The forms of a chat template, found by rendering a call with it and by the marks that it mentions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.forms import ParsedArguments
from kvsieve.planning.turns import render
from kvsieve.serve.parsers.deepseek import DeepSeekCalls
from kvsieve.serve.parsers.form import AnswerForm, CallForm, Tools
from kvsieve.serve.parsers.gemma import FUNCTION_GEMMA, GEMMA_4
from kvsieve.serve.parsers.harmony import HarmonyCalls
from kvsieve.serve.parsers.kimi import KimiCalls
from kvsieve.serve.parsers.mistral import MistralCalls
from kvsieve.serve.parsers.objects import BareCalls, MarkedCalls
from kvsieve.serve.parsers.reasoning import MARKS, MarkedReasoning
from kvsieve.serve.parsers.tagged import GLM, QWEN_CODER, TaggedCalls, schemas_of

_NAME = "kvsieve_probe"
_KEY = "kvsieve_key"
# What the probe is rendered as, and the form of that; the first that is found.
_FORMS: tuple[tuple[str, Callable[[Tools], CallForm]], ...] = (
    (rf"to=functions\.{_NAME}", lambda tools: HarmonyCalls(_names(tools))),
    (rf"<function={_NAME}>", lambda tools: TaggedCalls(QWEN_CODER, schemas_of(tools))),
    (rf"<tool_call>\s*{_NAME}\s*<arg_key>", lambda tools: TaggedCalls(GLM, schemas_of(tools))),
    (rf'<tool_call>\s*\{{[^<]*"{_NAME}"', lambda tools: MarkedCalls()),
    (rf'\[TOOL_CALLS\]\s*\[\s*\{{[^\]]*"{_NAME}"', lambda tools: MistralCalls()),
    (rf"\[TOOL_CALLS\]\s*{_NAME}\b", lambda tools: MistralCalls(listed=False)),
    (rf"function<｜tool▁sep｜>{_NAME}\s*```json", lambda tools: DeepSeekCalls(fenced=True)),
    (rf"<｜tool▁call▁begin｜>\s*{_NAME}\s*<｜tool▁sep｜>", lambda tools: DeepSeekCalls()),
    (rf"<\|tool_call_begin\|>\s*functions\.{_NAME}", lambda tools: KimiCalls()),
    (rf"<start_function_call>call:{_NAME}", lambda tools: FUNCTION_GEMMA),
    (rf"<\|tool_call>call:{_NAME}", lambda tools: GEMMA_4),
    (
        rf'(?<!\[)\s*\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{\s*"{_KEY}"',
        lambda tools: BareCalls(_names(tools)),
    ),
)
# Names of a message's member for reasoning, in the order in which templates that know several prefer them.
_MEMBERS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class TemplateForms:
    """Forms of a chat template's answers.

    Attributes:
        calls: returns the form of calls of some tools; None if calls cannot be found in an answer.
        reasoning: marks around reasoning; None for none.
        member: name of a message's member with the reasoning of an earlier answer.
        channels: answers are messages in channels, with or without tools.
    """

    calls: Callable[[Tools], CallForm] | None = None
    reasoning: MarkedReasoning | None = None
    member: str = "reasoning_content"
    channels: bool = False

    def answer(self, prompt: str, tools: Tools, single: bool = False, named: bool = False) -> AnswerForm:
        """Return the form of the answer to a prompt.

        Args:
            prompt: rendered by the template.
            tools: that the model may call; none for an answer without calls.
            single: drop all calls but the first.
            named: a tool is forced by name.
        """
        calls = self.calls(tools) if self.calls is not None and (tools or self.channels) else None
        reasoning = None if self.reasoning is None else self.reasoning.after(prompt)
        return AnswerForm(calls, reasoning, single, named)


def forms_of(tokenizer: Any) -> TemplateForms:
    """Return the forms of the chat template of a tokenizer, which may have none."""
    template = tokenizer.chat_template
    source = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    calls = _calls(tokenizer) if source else None
    if "<|channel|>" in source and "<|message|>" in source:
        return TemplateForms(calls or (lambda tools: HarmonyCalls(_names(tools))), None, "thinking", channels=True)
    reasoning = next((marks for marks in MARKS if marks.end in source), None)
    member = next((name for name in _MEMBERS if re.search(rf"[.'\"]{name}\b", source)), _MEMBERS[0])
    return TemplateForms(calls, reasoning, member)


def _calls(tokenizer: Any) -> Callable[[Tools], CallForm] | None:
    nothing = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": nothing}}
    function = {"name": _NAME, "arguments": ParsedArguments({_KEY: 1}, f'{{"{_KEY}": 1}}')}
    # Some templates write the id of a call instead of its name; those that refuse this one get a short one.
    call = {"id": f"functions.{_NAME}:0", "type": "function", "function": function}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = render(tokenizer, [{"role": "user", "content": "?"}, called], ask=False, tools=[tool])
    except InputError:
        return None
    return next((form for pattern, form in _FORMS if re.search(pattern, text)), None)


def _names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)
