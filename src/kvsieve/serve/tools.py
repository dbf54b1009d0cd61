"""Tool calls in an answer's text, in the form of the model's chat template."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.forms import CallArguments
from kvsieve.planning.turns import render

# Hermes' and Qwen's way.
MARK = "<tool_call>"
_END = "</tool_call>"
_NAME = "kvsieve_probe"
# Llama 3's way: only the object.
_BARE = re.compile(rf'(?<!\[)\s*\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{\s*\}}')
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallForm:
    """The form in which a model writes tool calls.

    Attributes:
        marked: a JSON object between `<tool_call>` and `</tool_call>`.
        bare: tools that an answer may call by consisting of a JSON object only.
    """

    marked: bool = True
    bare: frozenset[str] = frozenset()

    def may_begin(self, text: str) -> bool:
        """Return whether a text is, or may become, a call."""
        begun = text.lstrip()
        marks = [mark for mark, used in ((MARK, self.marked), ("{", bool(self.bare))) if used]
        return not begun or any(begun.startswith(mark) or mark.startswith(begun) for mark in marks)


def form_of(tokenizer: Any, names: Collection[str]) -> CallForm | None:
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
        return CallForm()
    return CallForm(False, frozenset(names)) if _BARE.search(text) else None


def new_id() -> str:
    """Return a call's id of nine letters and digits, the only ones that some templates accept."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def split_calls(text: str, form: CallForm = CallForm()) -> tuple[str, list[dict[str, Any]]]:
    """Separate the tool calls from an answer's text.

    Returns:
        The rest of the text, and the calls in OpenAI's protocol; invalid JSON stays text.
    """
    if form.marked and MARK in text:
        parts = list(_marked(text))
        calls = [part for part in parts if not isinstance(part, str)]
        return ("".join(part for part in parts if isinstance(part, str)).strip() if calls else text), calls
    found = _object(text.strip()) if form.bare else None
    if found is not None and found["name"] in form.bare and found.keys() & {"arguments", "parameters"}:
        return "", [_call(found)]
    return text, []


def _marked(text: str) -> Iterator[str | dict[str, Any]]:
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
        yield _call(found)
        at = start + len(inside) - len(behind) + (len(_END) if behind else 0)
    yield text[at:]


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("name"), str) else None


def _call(found: dict[str, Any]) -> dict[str, Any]:
    arguments = found.get("arguments", found.get("parameters"))
    arguments = {} if arguments is None else arguments
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": new_id(), "type": "function", "function": {"name": found["name"], "arguments": arguments}}
