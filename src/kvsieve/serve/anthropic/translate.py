"""Anthropic's request as a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.serve.anthropic.schema import (
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    Source,
)
from kvsieve.serve.failures import Failure, renamed
from kvsieve.serve.messages import REASONS
from kvsieve.serve.schema import ChatRequest

# Of tool calls; the rest of an id is the chat template's.
ID_PREFIX = "toolu_"
# Begin of a block before the system prompt that some agents change with each request, so that no prefix is found.
_BILLING = "x-anthropic-billing-header:"
_THINKING = {"enabled": True, "disabled": False}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Kinds of blocks in the messages of each role.
_TAKEN = {
    "system": ("text",),
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")
# Members of a chat request, and its kind of part, that errors name, as they are called here.
_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "image_url": "image",
}


def chat_request(body: CountTokensRequest, most: int) -> ChatRequest:
    """Return the chat request of a body.

    Args:
        body: of a request, or of one whose tokens are counted.
        most: tokens that an answer may have at this server.

    Raises:
        InputError: for messages that the chat cannot have.
    """
    members: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        members["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        members["tool_choice"] = _choice(body.tool_choice)
        if body.tool_choice.disable_parallel_tool_use:
            members["parallel_tool_calls"] = False
    members |= _reasoning(body)
    form = None if body.output_config is None else body.output_config.format
    if None not in (form, body.output_format) and form != body.output_format:
        raise InputError("output_format: output_config.format names another form of the answer; leave one of them out")
    form = form or body.output_format
    if form is not None:
        members["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesRequest):
        members |= {
            "max_tokens": min(body.max_tokens, most),
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "kv": body.kv,
        }
    return ChatRequest.model_validate(members)


def _reasoning(body: CountTokensRequest) -> dict[str, Any]:
    """Return the members of a chat request by which templates turn reasoning on and off, and say how much of it."""
    members: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type in _THINKING:
        members["chat_template_kwargs"] = dict.fromkeys(REASONS, _THINKING[body.thinking.type])
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        members["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return members


def in_own_names(error: InputError | UnsupportedOptionError | Failure) -> Exception:
    """Return an error of a chat's preparation with the names that /v1/messages has for its members."""
    return renamed(error, _NAMES)


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    system = [block for block in body.system or () if not (block.text or "").startswith(_BILLING)]
    if system:
        _add(out, InputMessage(role="system", content=system), "system")
    for number, message in enumerate(body.messages):
        if not message.content:
            raise InputError(f"messages.{number}.content: expected one block at least")
        _add(out, message, f"messages.{number}.content")
    if out[-1]["role"] == "assistant":
        raise InputError(
            "messages: the last one is the assistant's, and answers that continue it are not made here; end with a "
            "message of the user"
        )
    return out


def _add(out: list[dict[str, Any]], message: InputMessage, place: str) -> None:
    """Append a message to those of a chat, or to the last of them if that has the same role."""
    for block in message.content:
        if block.type not in _TAKEN[message.role]:
            taken = ", ".join(_TAKEN[message.role])
            raise InputError(f"{place}: the {message.role}'s blocks are {taken}; got one of type {block.type!r}")
        if block.type == "tool_result":
            call_id = (block.tool_use_id or "").removeprefix(ID_PREFIX)
            out.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, place)})
            continue
        if not out or out[-1]["role"] != message.role:
            out.append({"role": message.role, "content": []})
        if message.role == "assistant":
            _add_answer(out[-1], block)
        else:
            out[-1]["content"] += _parts(block, place)


def _add_answer(answer: dict[str, Any], block: ContentBlock) -> None:
    if block.type == "text":
        answer["content"].append(_text(block.text))
    elif block.type == "thinking":
        answer["reasoning_content"] = answer.get("reasoning_content", "") + (block.thinking or "")
    elif block.type == "tool_use":
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        call = {"id": (block.id or "").removeprefix(ID_PREFIX), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _result(block: ContentBlock, place: str) -> list[dict[str, Any]]:
    """Return the parts of a tool's result; an error is marked by a word before it."""
    parts = [part for inner in block.content or () for part in _parts(inner, place)]
    return [_text("Error:"), *parts] if block.is_error else parts


def _parts(block: ContentBlock, place: str) -> list[dict[str, Any]]:
    """Return a block of a user or of a tool's result as parts of a chat's message."""
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise InputError(f"{place}: answers have no citations here; leave citations out")
    if block.type == "text":
        return [_text(block.text)]
    if block.type == "image" and block.source is not None:
        return [_image(block.source, place)]
    if block.type == "document" and block.source is not None:
        return [_text(_joined([block.title, block.context, *_document(block.source, place)]))]
    if block.type == "search_result":
        address = None if block.source is None else block.source.url
        return [_text(_joined([block.title, address, *_texts(block.content, place)]))]
    raise InputError(f"{place}: a block of type {block.type!r} is not read in this place; leave it out")


def _image(source: Source, place: str) -> dict[str, Any]:
    if source.type != "base64":
        raise InputError(
            f"{place}: an image is sent with a source of type base64, no address or file is fetched; got one of type "
            f"{source.type!r}"
        )
    if source.media_type not in _IMAGES:
        got = source.media_type
        raise InputError(f"{place}: an image's source.media_type is {', '.join(_IMAGES)}; got {got!r}")
    url = f"data:{source.media_type};base64,{source.data or ''}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(source: Source, place: str) -> list[str | None]:
    if source.type == "text":
        return [source.data]
    if source.type == "content":
        return _texts(source.content, place)
    raise InputError(
        f"{place}: a document is sent as text, with a source of type text or content, and no PDF, address or file is "
        f"read; got one of type {source.type!r}"
    )


def _texts(blocks: Iterable[ContentBlock] | None, place: str) -> list[str | None]:
    blocks = list(blocks or ())
    for block in blocks:
        if block.type != "text":
            raise InputError(f"{place}: a document's blocks are text; got one of type {block.type!r}")
    return [block.text for block in blocks]


def _joined(texts: Iterable[str | None]) -> str:
    return "\n".join(text for text in texts if text)


def _text(text: str | None) -> dict[str, Any]:
    return {"type": "text", "text": text or ""}


def _tool(tool: MessageTool) -> dict[str, Any]:
    examples = [f"Example of its input: {json.dumps(one, ensure_ascii=False)}" for one in tool.input_examples or ()]
    description = _joined([tool.description, *examples]) or None
    function = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(choice: MessageToolChoice) -> Any:
    if (choice.name is None) == (choice.type == "tool"):
        raise InputError(f"tool_choice: the type tool has a name, others have none; got {choice.type} {choice.name!r}")
    if choice.type != "tool":
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}
