"""Forms of a chat's messages for different chat templates: texts or parts, arguments as objects or as text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
# Characters of the ids of tool calls in Mistral's templates, which refuse others.
_ID_LENGTH = 9
# Output of templates that treat parts as text, as Python or as JSON.
_PRINTED = ("'type': 'text'", '"type": "text"')


class ParsedArguments(dict[str, Any]):
    """Arguments of a tool call as an object, with their text, as written by the model."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


def forms(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Yield a chat in the forms that templates accept, the given one first.

    Then: parts joined to a text, one per line, if all are texts; every text as a part; arguments of calls as text only;
    and all of these with ids of calls of nine letters and digits.
    """
    original = [dict(message) for message in messages]
    found = [original]
    if any(isinstance(message.get("content"), list) for message in original):
        found.append(_contents(original, _joined))
    found.append(_contents(original, _parted))
    texts = [_with_text_arguments(message) for message in _contents(original, _joined)]
    if any("tool_calls" in message for message in texts):
        found.append(texts)
    yield from found
    for form in found:
        short = [_with_short_ids(message) for message in form]
        if short != form:
            yield short


def shows(text: str, messages: Messages) -> bool:
    """Return whether a rendered chat has the texts of its user's messages, and no Python data written out."""
    said = [part for message in messages if message.get("role") == "user" for part in _texts(message.get("content"))]
    printed = [
        str(found) for message in messages for found in _arguments(message) if found and not isinstance(found, str)
    ]
    if any(isinstance(message.get("content"), list) for message in messages):
        printed += _PRINTED
    # A user may say it, too.
    written = any(mark in text and not any(mark in part for part in said) for mark in printed)
    return not written and all(part.strip() in text for part in said)


def _arguments(message: Mapping[str, Any]) -> list[Any]:
    return [call.get("function", call).get("arguments") for call in message.get("tool_calls") or ()]


def _texts(content: Any) -> list[str]:
    if isinstance(content, list):
        return [part["text"] for part in content if "text" in part]
    return [content] if isinstance(content, str) else []


def _contents(messages: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    return [
        {**message, "content": change(message["content"])} if "content" in message else message for message in messages
    ]


def _joined(content: Any) -> Any:
    if not isinstance(content, list) or any("text" not in part for part in content):
        return content
    return "\n".join(_texts(content))


def _parted(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Replace the ids of a message's calls, or of the call that it answers, by nine letters and digits."""
    if isinstance(message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if message.get("tool_calls"):
        calls = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in message["tool_calls"]
        ]
        message = {**message, "tool_calls": calls}
    return message


def _short_id(call_id: str) -> str:
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_ID_LENGTH]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls:
        if "function" in call and isinstance(arguments := call["function"].get("arguments"), ParsedArguments):
            call["function"] = {**call["function"], "arguments": arguments.text}
    return {**message, "tool_calls": calls}
