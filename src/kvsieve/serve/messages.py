"""Messages, tools and calls in the form of chat templates."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.forms import ParsedArguments
from kvsieve.serve.images import ImageFile, image_file
from kvsieve.serve.schema import ChatMessage, ChatRequest, ContentPart, NamedTool, Tool, ToolCall

# Variables by which chat templates turn reasoning on and off.
REASONS = ("enable_thinking", "thinking")
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


def template_options(request: ChatRequest, tokenizer: Any) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets.

    Raises:
        InputError: it names one that the server sets.
    """
    own = request.chat_template_kwargs or {}
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if names := sorted(taken.intersection(own)):
        raise InputError(f"chat_template_kwargs: the server sets {names[0]!r} itself; leave it out")
    effort = request.reasoning_effort
    reasons = dict.fromkeys(REASONS, False) if effort == "none" else {}
    named = {} if effort is None else {"reasoning_effort": effort}
    return {**reasons, **named, **own}


def forced_tools(request: ChatRequest, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools of which the answer must call one; none if it need not call any.

    Raises:
        InputError: the tool that is forced is not among the tools.
    """
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return []
    if not tools:
        raise InputError("tool_choice: a call is forced, and the request has no tools; give some, or leave it out")
    if not isinstance(choice, NamedTool):
        return tools
    found = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    if not found:
        raise InputError(f"tool_choice: none of the request's tools is named {choice.function.name!r}")
    return found


def template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call for chat templates, with arguments as an object, if they are one, besides their text."""
    text = (call.function.arguments or "").strip() or "{}"
    arguments: Any = text
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        arguments = ParsedArguments(found, text) if isinstance(found, dict) else text
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def template_message(
    message: ChatMessage,
    place: str = "messages",
    files: list[ImageFile] | None = None,
    reasoning: str = "reasoning_content",
) -> dict[str, Any]:
    """Return a message for chat templates.

    Args:
        message: of the request.
        place: of the message in the request, for errors.
        files: gets its images; None for a model of text alone.
        reasoning: name of the template's member for reasoning.

    Raises:
        InputError: it has no content.
    """
    content = message.content if message.content is not None else message.refusal
    if content is None and not message.tool_calls and message.reasoning_content is None:
        raise InputError(f"messages: the {message.role}'s message has no content")
    out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if isinstance(content, list):
        parts = [template_part(part, f"{place}.content.{number}", files) for number, part in enumerate(content)]
        plain = len(parts) < 2 and all(part["type"] == "text" for part in parts)
        out["content"] = "".join(part["text"] for part in parts) if plain else parts
    if message.reasoning_content is not None:
        out[reasoning] = message.reasoning_content
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [template_call(call) for call in message.tool_calls]
    return out
