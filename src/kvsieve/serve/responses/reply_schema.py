"""Bodies of replies of /v1/responses for the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

from kvsieve.serve.reply_schema import ERRORS, KVUsage, Responses, TokenLogprob
from kvsieve.serve.responses.schema import ChosenFunction, InputItem
from kvsieve.serve.schema import Strict

Status = Literal["completed", "incomplete"]


class OutputText(Strict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Strict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Strict):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Strict):
    """Reasoning of the model, before its message."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Strict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(Strict):
    """Tokens of a prompt. cached_tokens: those from the prefix cache; cache_write_tokens: always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Strict):
    """Tokens of an answer. reasoning_tokens: those of its reasoning."""

    reasoning_tokens: int


class ResponseUsage(Strict):
    """Tokens of a response, and kept entries."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    kv: KVUsage | None = None


class IncompleteDetails(Strict):
    """Reason why an answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseReply(Strict):
    """Body of a reply of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage
    previous_response_id: str | None
    instructions: str | None
    store: bool
    background: Literal[False]
    temperature: float
    top_p: float | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    top_logprobs: int
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | ChosenFunction
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class ItemsReply(Strict):
    """Body of a reply of /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedReply(Strict):
    """Body of a reply to the deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


_DATA = {"type": "string", "description": "An event of the response, as JSON, with its name in `type`."}
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": _DATA}, "required": ["event", "data"]}
RESPONSE: Responses = {
    **ERRORS,
    200: {
        "model": ResponseReply,
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
        "description": "The response, whole or streamed",
    },
}
STORED: Responses = {**ERRORS, 200: {"model": ResponseReply, "description": "The response"}}
ITEMS: Responses = {**ERRORS, 200: {"model": ItemsReply, "description": "Items of the response's input"}}
DELETED: Responses = {**ERRORS, 200: {"model": DeletedReply, "description": "The response was deleted"}}
