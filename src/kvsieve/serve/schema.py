"""Bodies of requests in OpenAI's protocol, with kvsieve's additions in `kv`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvsieve.serve.bodies import JsonShape


def _whole(value: Any) -> Any:
    """Return a whole number written with a point, such as 100.0, as int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, Field(max_length=1 << 23)]
Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
# Nobody's draws need more, and some generators take no more.
Seed = Annotated[Whole, Field(ge=-(2**62), le=2**62)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
# A list's first fault says enough; all of them would take hundreds of bytes each.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]


def _bounded(arguments: str) -> str:
    """Check the text of a call's arguments like a body, because it is parsed, too."""
    if arguments.lstrip().startswith("{"):
        JsonShape().add(arguments.encode(errors="surrogatepass"))
    return arguments


Arguments = Annotated[Text, AfterValidator(_bounded)]


class Strict(BaseModel):
    """A body without unknown members, and without numbers as text or as true and false.

    A whole number, except a token id, may be written with a point: 100.0 for 100.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class KVOptions(Strict):
    """Options of kvsieve for this request's prompt, within the operator's limits.

    Attributes:
        method: one of those that /v1/kv lists.
        budget: entries kept per layer and KV head: a share such as "10%", or a number.
        codec: quantizes entries, such as "kivi:bits=4"; "none" for none.
        protect: numbers of messages (of a chat), or spans of token numbers (of a completion), never evicted.
        question: True to hide the last message from the plan, or the number of last tokens to hide.
        session: continue the conversation of this name, as a chat does, on the entries that the plan left.
        map: number of parts of the prompt in a map of kept entries, returned in `usage.kv.map`.
        draft: where drafts of the answer come from, such as "lookup:tokens=4"; "none" for none.
        edits: False to prefill a prompt that does not continue its session, instead of editing the session.
        documents: texts before the first user message's text, each prefilled alone and found in the store.
        join: how they become one prompt, such as "blend" (default "link:shift=true").
    """

    method: Annotated[str, Field(max_length=100)] | None = None
    budget: Annotated[str, Field(max_length=20)] | int | float | None = None
    codec: Annotated[str, Field(max_length=60, pattern=r"^[a-z0-9-]+(:[a-z_]+=[a-z0-9.]+)*$")] | None = None
    protect: Annotated[list[Whole | tuple[Whole, Whole]], Field(max_length=100, fail_fast=True)] | None = None
    question: bool | Annotated[Whole, Field(ge=1)] | None = None
    session: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")] | None = None
    map: Annotated[Whole, Field(ge=0, le=512)] | None = None
    draft: Annotated[str, Field(max_length=100)] | None = None
    edits: bool | None = None
    documents: Texts | None = None
    join: Annotated[str, Field(max_length=60, pattern=r"^[a-z-]+(:[a-z_]+=[a-z0-9.%]+)*$")] | None = None


class StreamOptions(Strict):
    """Options of streaming."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CommonRequest(Strict):
    """Members of both kinds of requests. Those specific to OpenAI's services have no effect.

    Every member but `model`, `messages` and those of a message may be null, the same as missing.

    Attributes:
        ignore_eos: go on behind end tokens; with a grammar, while it allows more.
        grammar: a Lark grammar that the answer matches.
        regex: a regular expression that the answer matches.
    """

    model: Annotated[str, Field(max_length=300)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Field(max_length=1024, fail_fast=True)] | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    ignore_eos: bool | None = None
    grammar: Text | None = None
    regex: Text | None = None
    kv: KVOptions | None = None
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None


class FunctionCall(BaseModel):
    """A function called by the model."""

    name: Annotated[str, Field(max_length=200)]
    arguments: Arguments | None = None


class ToolCall(BaseModel):
    """A call of a tool."""

    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


def check_no_schema(form: dict[str, Any], place: str) -> None:
    """Refuse a schema in a form of the answer whose type has none. place: of schemas, for the error."""
    name = next((name for name in ("schema", "json_schema") if form.get(name) is not None), None)
    if name is not None:
        fault = "a {name} has no effect with the type {type}; send the type json_schema with {place}"
        raise PydanticCustomError("refused", fault, {"name": name, "type": form["type"], "place": place})


class ImageURL(BaseModel):
    """An image as a data URL, data:image/png;base64,... The detail has no effect: the processor chooses sizes."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ContentPart(BaseModel):
    """A part of a message's content. Parts that are neither text nor image are refused by name.

    image_url: a bare text is refused in words, as OpenAI does.
    """

    type: Annotated[str, Field(max_length=40)]
    text: Text | None = None
    refusal: Text | None = None
    # No text of the prompt.
    image_url: Annotated[ImageURL | Text | None, Field(exclude=True)] = None


class ChatMessage(Strict):
    """A message of a chat.

    Attributes:
        reasoning_content: of an earlier answer, as it was returned.
        parsed: content that OpenAI's client has parsed; has no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    parsed: Any = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class Function(Strict):
    """A function that the model may call. strict: has no effect; forced calls are valid in any case."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A tool by its name."""

    name: Annotated[str, Field(min_length=1, max_length=200)]


class NamedTool(Strict):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A JSON schema that the answer matches. The name and the description have no effect."""

    name: Annotated[str, Field(max_length=200)] | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer: text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_its_schema(cls, value: Any) -> Any:
        """Refuse schemas that would have no effect."""
        if isinstance(value, dict) and value.get("type") in ("text", "json_object"):
            check_no_schema(value, '"json_schema": {"schema": ...}')
        return value


class ChatRequest(CommonRequest):
    """Body of /v1/chat/completions.

    Attributes:
        return_progress: stream the progress of the prefill in `prompt_progress`, as llama.cpp's server does.
        chat_template_kwargs: variables of the chat template, such as enable_thinking, as vLLM's server has them.
        reasoning_effort: passed to the chat template, where it has an effect if the template uses it; "none" also sets
            enable_thinking and thinking to false.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    return_progress: bool | None = None
    chat_template_kwargs: Annotated[dict[VariableName, Any], Field(max_length=32)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    # OpenAI's other members, which must be absent.
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    verbosity: None = None
    web_search_options: None = None


class CompletionRequest(CommonRequest):
    """Body of /v1/completions.

    Attributes:
        prompt: null for a text from its beginning.
        parse_special: false reads control tokens that a text spells as text.
    """

    prompt: Text | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] | None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    parse_special: bool | None = None
    best_of: Annotated[Whole, Field(ge=1)] | None = None
    suffix: None = None


class TokenizeRequest(Strict):
    """Body of /tokenize.

    Attributes:
        add_special_tokens: false omits the special tokens that the tokenizer adds to any text.
        count_only: return the number of tokens without their ids.
    """

    model: Annotated[str, Field(max_length=300)]
    prompt: Text
    add_special_tokens: bool | None = None
    count_only: bool | None = None
