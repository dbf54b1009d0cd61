"""Tool calls in an answer's text, as chat templates have models write them."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

# Hermes' and Qwen's way; Llama 3 writes the bare object.
_MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
MARK = "<tool_call>"


def may_be_call(text: str) -> bool:
    """Tell whether a text, or what it may become, is a call of a tool."""
    begun = text.lstrip()
    return not begun or any(begun.startswith(each) or each.startswith(begun) for each in (MARK, "{"))


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Take the tool calls out of an answer's text.

    Returns:
        What is left of the text, and the calls as OpenAI's protocol has them; a call that is no JSON stays text.
    """
    calls = []

    def taken(match: re.Match[str]) -> str:
        call = _call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    left = _MARKED.sub(taken, text)
    if not calls and text.lstrip().startswith("{"):
        call = _call(text.strip())
        if call is not None:
            return "", [call]
    return (left.strip() if calls else text), calls


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": found["name"], "arguments": arguments},
    }
