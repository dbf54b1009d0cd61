"""Bodies of replies for the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvsieve.serve.schema import Strict, ToolCall


class ErrorDetail(Strict):
    """An error. param: the request's member at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Strict):
    """Body of every error, as in OpenAI's protocol."""

    error: ErrorDetail


class PromptTokensDetails(Strict):
    """Tokens of a prompt. cached_tokens: those from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Strict):
    """Tokens of the answers. reasoning_tokens: those of reasoning and its marks."""

    reasoning_tokens: int


class DraftedTokens(Strict):
    """Tokens drafted for the answers. accepted: those that became part of one."""

    tokens: int
    accepted: int


class EditUsage(Strict):
    """Entries that an edit or a join has left in the prompt.

    Attributes:
        share: share of the prompt's tokens with approximate entries.
        reused: tokens that kept their entries before this prompt; 0 if an earlier one was edited.
        reread: tokens that the edit prefilled.
        rules: rules by which entries are approximate.
    """

    share: float
    reused: int
    reread: int
    rules: list[str]


class JoinedDocuments(Strict):
    """Tokens of the request's documents: found in the store, prefilled alone, and prefilled again in their places."""

    join: str
    found: int
    prefilled: int
    reread: int


class KVUsage(Strict):
    """Entries kept of the first prompt; see docs/serving.md."""

    method: str
    applied: bool
    entries: float
    prompt_tokens: int
    share: float | None
    bytes: int
    notes: list[str]
    queued_s: float
    ttft_s: float
    seconds: float
    map: list[float] | None = None
    drafted: DraftedTokens | None = None
    edited: EditUsage | None = None
    documents: JoinedDocuments | None = None


class Usage(Strict):
    """Tokens of a request, and kept entries."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    kv: KVUsage | None = None


class TopToken(Strict):
    """A likely token."""

    token: str
    logprob: float = Field(le=0)
    bytes: list[int]


class TokenLogprob(TopToken):
    """A token of an answer, and the likeliest ones at its place."""

    top_logprobs: list[TopToken]


class ChatLogprobs(Strict):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(Strict):
    """An answer of a chat. reasoning_content: the model's reasoning, if the template marks it."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Strict):
    """An answer of a chat, with its finish reason."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class AnyReply(Strict):
    """Head of a reply."""

    id: str
    created: int
    model: str
    usage: Usage


class ChatReply(AnyReply):
    """Body of a reply of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(Strict):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Strict):
    """A continuation, with its finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionReply(AnyReply):
    """Body of a reply of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelReply(Strict):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsReply(Strict):
    """Body of a reply of /v1/models."""

    object: Literal["list"]
    data: list[ModelReply]


class TokenizeReply(Strict):
    """Body of a reply of /tokenize. max_model_len: the model's context, null if it has no limit."""

    count: int
    max_model_len: int | None
    tokens: list[int] | None


class HealthReply(Strict):
    """Body of a reply of /health."""

    status: Literal["ok", "closing"]


class KVReply(Strict):
    """Body of a reply of /v1/kv."""

    state: dict[str, int]
    counts: dict[str, int]
    store: dict[str, int]
    nodes: list[dict[str, Any]]
    plan: str
    methods: list[str]
    budget: str | None
    codecs: bool
    edits: bool
    draft: str
    context: int | None
    chunk: int
    max_tokens: int


_DATA = {"type": "string", "description": "A chunk of an answer, or an error, as JSON; [DONE] at the end."}
_EVENT = {"type": "object", "properties": {"data": _DATA}, "required": ["data"]}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {
    status: {"model": ErrorReply, "description": "An error, as OpenAI's protocol has them"}
    for status in (400, 401, 404, 405, 408, 413, 415, 422, 429, 500, 503)
}
CHAT: Responses = {
    **ERRORS,
    200: {"model": ChatReply, "content": _STREAM, "description": "The answers, whole or streamed"},
}
COMPLETION: Responses = {**ERRORS, 200: {**CHAT[200], "model": CompletionReply}}
TOKENIZE: Responses = {**ERRORS, 200: {"model": TokenizeReply, "description": "The tokens of a text"}}
HEALTH: Responses = {
    status: {"model": HealthReply, "description": "Whether requests are taken"} for status in (200, 503)
}
METRICS: Responses = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Counts, for Prometheus"}
}
