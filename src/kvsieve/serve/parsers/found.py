"""The form of a chat template, found by rendering a call with it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.forms import CallArguments
from kvsieve.planning.turns import render
from kvsieve.serve.parsers.form import CallForm
from kvsieve.serve.parsers.objects import MARK, BareCalls, MarkedCalls
from kvsieve.serve.pieces import new_id

_NAME = "kvsieve_probe"
_BARE = re.compile(rf'(?<!\[)\s*\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{\s*\}}')


def call_form(tokenizer: Any, names: Collection[str]) -> CallForm | None:
    """Return the form of a chat template's calls, or None if they cannot be found in an answer.

    Args:
        tokenizer: with a chat template.
        names: of tools that the model may call.
    """
    nothing = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": nothing}}
    function = {"name": _NAME, "arguments": CallArguments({}, "{}")}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": new_id(), "type": "function", "function": function}],
    }
    try:
        text = render(tokenizer, [{"role": "user", "content": "?"}, called], ask=False, tools=[tool])
    except InputError:
        return None
    if MARK in text:
        return MarkedCalls()
    return BareCalls(frozenset(names)) if _BARE.search(text) else None
