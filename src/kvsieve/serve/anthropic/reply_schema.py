"""Bodies of Anthropic's replies for the OpenAPI schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvsieve.serve.reply_schema import KVUsage, Responses
from kvsieve.serve.schema import Strict


class MessageErrorCode(Strict):
    """A code of an error, as in OpenAI's protocol."""

    error_code: str


class MessageErrorDetail(Strict):
    """An error."""

    type: str
    message: str
    details: MessageErrorCode | None = None


class MessageErrorReply(Strict):
    """Body of every error below /v1/messages, as in Anthropic's protocol."""

    type: Literal["error"]
    error: MessageErrorDetail


class TextBlock(Strict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """Reasoning of the model. signature: always the same."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Strict):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageTokensDetails(Strict):
    """Tokens of an answer that are reasoning, marks included."""

    thinking_tokens: int


class MessageUsage(Strict):
    """Tokens of a request, and kept entries. input_tokens: those that were not found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None = None
    kv: KVUsage | None = None


class MessageReply(Strict):
    """Body of a reply of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountReply(Strict):
    """Body of a reply of /v1/messages/count_tokens."""

    input_tokens: int


_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Name of the event, such as content_block_delta."},
        "data": {"type": "string", "description": "The event as JSON."},
    },
    "required": ["event", "data"],
}
_ERRORS: Responses = {
    status: {"model": MessageErrorReply, "description": "An error, as Anthropic's protocol has them"}
    for status in (400, 401, 404, 405, 408, 413, 415, 422, 429, 500, 503)
}
MESSAGE: Responses = {
    **_ERRORS,
    200: {
        "model": MessageReply,
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
        "description": "The answer, whole or streamed",
    },
}
COUNT: Responses = {**_ERRORS, 200: {"model": CountReply, "description": "The number of tokens of a prompt"}}
