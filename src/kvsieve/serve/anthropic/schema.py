"""Bodies of requests in Anthropic's protocol, with kvsieve's additions in `kv`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvsieve.serve.schema import KVOptions, Strict, Text, Whole

_ID = Annotated[str, Field(max_length=200)]
_Options = dict[str, Any]
# Characters of an unknown type that an error repeats.
_SHORT = 60

# Members of each kind of block: those that it needs, and those that it may have.
_MEMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("citations",)),
    "image": (("source",), ()),
    "document": (("source",), ("title", "context", "citations")),
    "search_result": (("content",), ("source", "title", "citations")),
    "tool_use": (("id", "name", "input"), ("caller",)),
    "tool_result": (("tool_use_id",), ("content", "is_error")),
    "thinking": (("thinking",), ("signature",)),
    "redacted_thinking": ((), ("data",)),
}


class Source(Strict):
    """Content of an image or a document. Addresses and files are refused by name."""

    type: _ID
    media_type: _ID | None = None
    data: Text | None = None
    content: Blocks | None = None
    url: Text | None = None
    file_id: Text | None = None


def _source(value: Any) -> Any:
    """Return an address, as search results have it, as a source."""
    return {"type": "url", "url": value} if isinstance(value, str) else value


class ContentBlock(Strict):
    """A block of a message's content.

    Attributes:
        cache_control: has no effect; repeated beginnings of prompts are found in any case.
        citations: of an earlier answer's text; none are made.
        signature: of an earlier answer's thinking; any is accepted.
    """

    type: _ID
    text: Text | None = None
    source: Annotated[Source, BeforeValidator(_source, json_schema_input_type=str | Source)] | None = None
    title: Text | None = None
    context: Text | None = None
    citations: list[Any] | _Options | None = None
    id: _ID | None = None
    name: _ID | None = None
    input: _Options | None = None
    caller: _Options | None = None
    tool_use_id: _ID | None = None
    content: Blocks | None = None
    is_error: bool | None = None
    thinking: Text | None = None
    signature: Text | None = None
    data: Text | None = None
    cache_control: _Options | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any) -> Any:
        """Refuse an unknown type by its name before its members, and members of other types."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            return value
        if kind not in _MEMBERS:
            known = ", ".join(_MEMBERS)
            raise _refused(f"no block of type {kind[:_SHORT]!r} is read here, only {known}; leave it out")
        needed, others = _MEMBERS[kind]
        for name in needed:
            if value.get(name) is None:
                raise _refused(f"a block of type {kind!r} has no {name}; add it")
        known_names = {"type", "cache_control", *needed, *others}
        for name, content in value.items():
            if name not in known_names and content is not None:
                raise _refused(f"a block of type {kind!r} has no member {name[:_SHORT]!r} here; leave it out")
        return {name: content for name, content in value.items() if name in known_names}


def _refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _blocks(content: Any) -> Any:
    """Return a text as a list of one block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[
    list[ContentBlock], Field(fail_fast=True), BeforeValidator(_blocks, json_schema_input_type=str | list[ContentBlock])
]
Source.model_rebuild()
ContentBlock.model_rebuild()


class InputMessage(Strict):
    """A message: a text, or blocks. Consecutive ones of one role are joined."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessageTool(Strict):
    """A tool that the model may call. Tools that Anthropic runs or defines are refused by name.

    Attributes:
        defer_loading: has no effect; every tool is in the prompt from its beginning.
    """

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    input_schema: _Options
    strict: bool | None = None
    cache_control: _Options | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[_Options], Field(max_length=100)] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise _refused(
                f"the tool of type {kind[:_SHORT]!r} is one that Anthropic runs or defines; describe it with an "
                "input_schema, or leave it out"
            )
        return value


class MessageToolChoice(Strict):
    """Choice of the tools that the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Reasoning before the answer, by the chat template's variables `enable_thinking` and `thinking`.

    Attributes:
        type: "adaptive" leaves the choice to the template.
        budget_tokens: has no effect.
        display: "omitted" leaves the text out of thinking blocks.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """A JSON schema that the answer matches."""

    type: Literal["json_schema"]
    schema_: Annotated[_Options, Field(alias="schema")]


class OutputConfig(Strict):
    """Form of the answer. effort: has an effect if the chat template uses `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(Strict):
    """A change of the conversation. Chat templates leave thinking out by themselves; nothing else is changed here."""

    type: _ID
    keep: Any = None

    @model_validator(mode="before")
    @classmethod
    def _of_thinking(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and not kind.startswith("clear_thinking_"):
            raise _refused(f"no edit of type {kind[:_SHORT]!r} is made here; leave it out, or shorten the messages")
        return value


class ContextManagement(Strict):
    """Changes of the conversation before it is read."""

    edits: Annotated[list[ContextEdit], Field(max_length=20, fail_fast=True)] | None = None


class CountTokensRequest(Strict):
    """Body of /v1/messages/count_tokens.

    Every member but `model` and `messages` may be null, the same as missing. cache_control and speed have no effect.
    """

    model: Annotated[str, Field(max_length=300)]
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Blocks | None = None
    tools: Annotated[list[MessageTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: _Options | None = None
    speed: Text | None = None
    # Anthropic's other members, which must be absent.
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages. metadata, service_tier and diagnostics have no effect; a thread is refused.

    Attributes:
        max_tokens: of the answer; more than the server's --max-tokens is that limit.
        kv: as in a chat. protect counts the system prompt as message 0, and each tool_result as a message.
    """

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=0, le=1_000_000)] | None = None
    kv: KVOptions | None = None
    metadata: _Options | None = None
    service_tier: Text | None = None
    diagnostics: _Options | None = None
    container: None = None
    inference_geo: None = None
    thread: _Options | Literal[False] | None = None
