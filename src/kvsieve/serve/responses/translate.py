"""Bodies of /v1/responses, translated into chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from kvsieve.serve.failures import Failure
from kvsieve.serve.responses.schema import (
    LOGPROBS,
    ChosenFunction,
    FunctionTool,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
)
from kvsieve.serve.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    FunctionCall,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)

_TEXTS = ("input_text", "output_text", "summary_text", "reasoning_text")
# Members of a chat, and its kind of part, by their names here.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "image_url": "input_image",
}


def chat_request(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> ChatRequest:
    """Return the chat of a body.

    Args:
        body: the request.
        earlier: items of the conversation before it.

    Raises:
        Failure: no items, incomplete ones, those of unknown types, and outputs without their call.
    """
    conversation = _ItemMessages(body.instructions)
    for item in earlier:
        conversation.add("previous_response_id", item)
    for number, item in enumerate(body.input or ()):
        conversation.add(f"input.{number}", item)
    messages = conversation.messages()
    if not messages or not (earlier or body.input):
        raise _refused("input", "expected a text, or a list of items with at least one that is not empty reasoning")
    wants_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants_logprobs:
        raise _refused("top_logprobs", f"needs {LOGPROBS!r} in include")
    return ChatRequest(
        model=body.model,
        messages=messages,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(None if body.text is None else body.text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        kv=body.kv,
    )


def listed(item: InputItem) -> dict[str, Any]:
    """Return an item of the input as it is stored and listed: with an id, and with its content in parts."""
    prefix = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}.get(item.type, "msg")
    out = {"status": "completed", **item.model_dump(exclude_none=True)}
    if item.content is not None:
        out["content"] = [_listed_part(part, item.role) for part in item.content]
    if item.output is not None:
        out["output"] = [_listed_part(part, None) for part in item.output]
    if item.type == "reasoning":
        out.setdefault("summary", [])
    return {**out, "id": item.id or f"{prefix}_{uuid4().hex}", "type": item.type}


@dataclass
class _MessageDraft:
    """A message in progress.

    Attributes:
        role: of the message.
        parts: of a user's message, or of a call's output.
        texts: of a system's or an assistant's message.
        reasoning: before an assistant's texts.
        calls: after them.
        call_id: of an output's call.
    """

    role: Literal["system", "user", "assistant", "tool"]
    parts: list[ContentPart] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> ChatMessage:
        text = ("\n\n" if self.role == "system" else "").join(self.texts)
        return ChatMessage(
            role=self.role,
            content=self.parts or text,
            reasoning_content="".join(self.reasoning) if self.reasoning else None,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
        )


class _ItemMessages:
    """Messages of a chat, made from items."""

    def __init__(self, instructions: str | None) -> None:
        self._turns = [] if instructions is None else [_MessageDraft("system", texts=[instructions])]
        self._calls: set[str | None] = set()

    def messages(self) -> list[ChatMessage]:
        return [turn.message() for turn in self._turns]

    def add(self, place: str, item: InputItem) -> None:
        """Add an item. place: of it in the body, for errors."""
        match item.type:
            case "message":
                _check(place, item, "role", "content")
                self._message(place, item)
            case "reasoning":
                self._reasoning(place, item)
            case "function_call":
                _check(place, item, "call_id", "name", "arguments")
                self._calls.add(item.call_id)
                function = FunctionCall(name=item.name or "", arguments=item.arguments)
                self._assistant().calls.append(ToolCall(id=item.call_id, function=function))
            case "function_call_output":
                _check(place, item, "call_id", "output")
                if item.call_id not in self._calls:
                    fault = f"no function call before it has the id {item.call_id!r}"
                    raise _refused(f"{place}.call_id", f"{fault}; send the call too, or use previous_response_id")
                self._turns.append(_MessageDraft("tool", _parts(item.output), call_id=item.call_id))
            case other:
                taken = "send messages, function calls, their outputs and reasoning"
                raise _refused(place, f"items of type {other!r} are not taken here; {taken}")

    def _message(self, place: str, item: InputItem) -> None:
        if item.role == "user":
            self._turns.append(_MessageDraft("user", _parts(item.content)))
            return
        text = _text(place, item.content)
        if item.role == "assistant":
            turn = self._assistant()
            if turn.texts and not turn.calls:
                turn = self._assistant(new=True)
            turn.texts.append(text)
        elif len(self._turns) == 1 and self._turns[0].role == "system":
            # Many templates take a single system message.
            self._turns[0].texts.append(text)
        else:
            self._turns.append(_MessageDraft("system", texts=[text]))

    def _reasoning(self, place: str, item: InputItem) -> None:
        parts = item.content or item.summary
        if not parts and item.encrypted_content is not None:
            raise _refused(place, "encrypted reasoning cannot be read here; leave the item out")
        if parts:
            turn = self._assistant()
            if turn.texts or turn.calls:
                turn = self._assistant(new=True)
            turn.reasoning.append(_text(place, parts))

    def _assistant(self, new: bool = False) -> _MessageDraft:
        """Return the assistant's turn at the end of the conversation; a new one if there is none, or if `new`."""
        if new or not self._turns or self._turns[-1].role != "assistant":
            self._turns.append(_MessageDraft("assistant"))
        return self._turns[-1]


def _check(place: str, item: InputItem, *names: str) -> None:
    for name in names:
        if name not in item.model_fields_set:
            raise _refused(f"{place}.{name}", f"missing; an item of type {item.type!r} has it")


def _refused(param: str, message: str) -> Failure:
    return Failure(400, f"{param}: {message}", code="invalid_value", param=param)


def _part(part: InputPart) -> ContentPart:
    if part.type in _TEXTS:
        return ContentPart(type="text", text=part.text)
    if part.type != "input_image":
        return ContentPart(type=part.type, text=part.text, refusal=part.refusal)
    if part.image_url is None:
        raise _refused("input", "an image needs image_url with its data; files of OpenAI's are not known here")
    return ContentPart.model_validate({"type": "image_url", "image_url": {"url": part.image_url}})


def _parts(parts: Iterable[InputPart] | None) -> list[ContentPart]:
    return [_part(part) for part in parts or ()]


def _text(place: str, parts: Iterable[InputPart] | None) -> str:
    """Return the text of parts where a chat has a single text. Raises Failure for parts that are no text."""
    texts = []
    for part in parts or ():
        text = part.text if part.type in _TEXTS else part.refusal
        if text is None:
            raise _refused(place, f"expected text, got a part of type {part.type!r}")
        texts.append(text)
    return "".join(texts)


def _listed_part(part: InputPart, role: str | None) -> dict[str, Any]:
    out = part.model_dump(exclude_none=True)
    if role == "assistant" and part.type == "input_text":
        out["type"] = "output_text"
    if out["type"] == "output_text":
        out["annotations"] = []
    if part.type == "input_image":
        out.setdefault("detail", "auto")
    return out


def _tool(tool: FunctionTool) -> Tool:
    members = tool.model_dump(include={"name", "description", "parameters", "strict"})
    return Tool(type="function", function=Function(**members))


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, ChosenFunction):
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return choice


def _response_format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type != "json_schema":
        return None if form is None else ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise _refused("text.format.schema", "missing; the format 'json_schema' has it")
    members = form.model_dump(by_alias=True, include={"name", "description", "schema_", "strict"})
    schema = JsonSchema.model_validate(members)
    return ResponseFormat(type="json_schema", json_schema=schema)
