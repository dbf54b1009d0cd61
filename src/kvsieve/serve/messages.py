"""Messages, tools and calls in the form of chat templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.forms import CallArguments
from kvsieve.serve.images import ImageFile, image_file
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


def template_part(part: ContentPart, place: str, files: list[ImageFile] | None) -> dict[str, Any]:
    """Return a part of a message for chat templates.

    Args:
        part: of text, or an image.
        place: of the part in the request.
        files: gets the image; None for a model of text alone.

    Raises:
        InputError: a part of another kind, or an image for a model of text.
        Failure: an image that is no data URL.
    """
    if part.type == "image_url" and files is not None:
        files.append(image_file(part, place))
        return {"type": "image"}
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is not None:
        return {"type": "text", "text": text}
    kind = next((name for mark, name in _KINDS.items() if mark in part.type), "such parts")
    if kind == "images" and files is not None:
        raise InputError(f"messages: an image is a part of type 'image_url' here, got {part.type!r}")
    raise InputError(
        f"messages: {kind} are not read here, the model is given text alone; leave the part of type {part.type!r} out"
        if part.type not in ("text", "refusal")
        else f"messages: a part of type {part.type!r} has no {part.type}"
    )


def parted(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with every text as a part: templates with images rarely take both forms in one chat."""
    texts = (message.get("content") for message in messages)
    contents = ([{"type": "text", "text": text}] if isinstance(text, str) and text else text for text in texts)
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]


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
