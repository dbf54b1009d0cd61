"""Bodies of requests to /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from kvsieve.serve.failures import Failure
from kvsieve.serve.schema import Arguments, KVOptions, StreamOptions, Strict, Text, Whole, check_no_schema

Name = Annotated[str, Field(max_length=200)]


class InputPart(BaseModel):
    """A part of an item's content. Parts of other kinds are refused by name, so their members are not listed."""

    type: Annotated[str, Field(max_length=40)]
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | None = None
    detail: Annotated[str, Field(max_length=20)] | None = None


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[InputPart], Field(fail_fast=True), BeforeValidator(_parts, json_schema_input_type=Text | list[InputPart])
]


class InputItem(Strict):
    """An item of the input or of an earlier output: a message, a function call, its output, or reasoning.

    Attributes:
        type: "message" if missing.
        role: of a message.
        content: of a message, or of reasoning; a text is a single part.
        call_id: of a call and of its output.
        name: of the called function.
        arguments: of a call.
        output: of a call; a text is a single part.
        summary: of reasoning, read where it has no content.
        encrypted_content: of reasoning; read by OpenAI only.
        id: without effect, as are `status` and `phase`.
    """

    type: Annotated[str, Field(max_length=40)] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Arguments | None = None
    output: Parts | None = None
    summary: Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    encrypted_content: Text | None = None
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Remove null members, which clients send for all that an output item could have."""
        return {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[InputItem], Field(fail_fast=True), BeforeValidator(_items, json_schema_input_type=Text | list[InputItem])
]


def _function(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        message = f"tools: a tool of type {kind[:40]!r} is not run here; offer it as a function, or leave it out"
        raise Failure(400, message, code="invalid_value", param="tools")
    return kind


class FunctionTool(Strict):
    """A function that the model may call. Tools that OpenAI runs are refused by name.

    Attributes:
        strict: has no effect; forced calls are valid in any case.
        defer_loading: has no effect, as has `output_schema`; every tool is in the prompt from its beginning.
    """

    type: Annotated[Literal["function"], BeforeValidator(_function)]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None


class ChosenFunction(Strict):
    """The function that the answer must call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=200)]


class TextFormat(Strict):
    """The form of the answer: text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_its_schema(cls, value: Any) -> Any:
        """Refuse schemas that would have no effect."""
        if isinstance(value, dict) and value.get("type") in ("text", "json_object"):
            check_no_schema(value, '"schema": ...')
        return value


class TextOptions(Strict):
    """Options of the answer's text. verbosity: only the default, which has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """Options of reasoning. Its text is returned as it is, so summaries may be "auto" only, without effect."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


LOGPROBS = "message.output_text.logprobs"
# The others change nothing: reasoning is not encrypted, and listed images have their data.
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url"]


class ResponsesRequest(Strict):
    """Body of /v1/responses. Every member but `model` may be null, the same as missing.

    Attributes:
        input: a text, or items; optional after `previous_response_id`.
        previous_response_id: response whose conversation is continued, without its instructions.
        store: False to keep nothing of the response.
        max_tool_calls: of tools that OpenAI runs, so without effect; as are `user`, `metadata` and the like.
        kv: options of kvsieve, as for a chat; `protect` counts the messages that the items make.
    """

    model: Annotated[str, Field(max_length=300)]
    input: Items | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Includable], Field(max_length=20, fail_fast=True)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[Whole, Field(ge=0)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    kv: KVOptions | None = None
    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    service_tier: str | None = None
    prompt_cache_key: Text | None = None
    # OpenAI's other members, which must be absent.
    access_programs: None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
