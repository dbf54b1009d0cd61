"""Messages, tools and calls in the form of chat templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.forms import CallArguments
from kvsieve.serve.schema import ContentPart, Tool, ToolCall

_KINDS = {"image": "images", "audio": "audio parts", "video": "videos", "file": "files"}


def all_texts(part: Any) -> Iterator[str]:
    """Yield all texts of a message or a tool, including names of an object's members."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for name, value in part.items():
            yield name
            yield from all_texts(value)
    elif isinstance(part, list):
        for value in part:
            yield from all_texts(value)


def part_text(part: ContentPart) -> str:
    """Return the text of a part. Raises InputError for an image or the like."""
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is not None:
        return text
    kind = next((name for mark, name in _KINDS.items() if mark in part.type), "such parts")
    raise InputError(
        f"messages: {kind} are not read here, the model is given text alone; leave the part of type {part.type!r} out"
        if part.type not in ("text", "refusal")
        else f"messages: a part of type {part.type!r} has no {part.type}"
    )


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool for chat templates, with null in its parameters unchanged."""
    function = {name: value for name, value in tool.function.model_dump().items() if value is not None}
    return {"type": tool.type, "function": function}


def template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call for chat templates, with arguments as an object, if they are one, besides their text."""
    text = (call.function.arguments or "").strip() or "{}"
    arguments: Any = text
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        arguments = CallArguments(found, text) if isinstance(found, dict) else text
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
