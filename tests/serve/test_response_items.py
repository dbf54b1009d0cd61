"""Parts of /v1/responses without a server: items into chats, pieces into items and events, stored responses."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from kvsieve.decoding.asked import AnswerPart
from kvsieve.errors import InputError
from kvsieve.serve.failures import Failure, renamed
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.pieces import CallArguments, CallBegin, Reasoning, Text
from kvsieve.serve.responses.items import OutputItems
from kvsieve.serve.responses.kept import KeptResponse, KeptResponses
from kvsieve.serve.responses.reply import ResponseRun
from kvsieve.serve.responses.schema import ResponsesRequest
from kvsieve.serve.responses.translate import NAMES, chat_request

EVENT = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": False}
CALLS = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in ("c1", "c2")]
OUTPUTS = [{"type": "function_call_output", "call_id": name, "output": name} for name in ("c1", "c2")]
REASONED = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]}
TURNS = {
    "instructions join the first system message": (
        [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}],
        [("system", "a\n\nb"), ("user", "c")],
    ),
    "a later system message is its own": (
        [{"role": "user", "content": "c"}, {"role": "system", "content": "d"}],
        [("system", "a"), ("user", "c"), ("system", "d")],
    ),
    "reasoning, text and calls are one message": (
        [{"role": "user", "content": "c"}, REASONED, SAID, *CALLS, *OUTPUTS],
        [("system", "a"), ("user", "c"), ("assistant", "Yes.", "Hm.", "c1", "c2"), ("tool", "c1"), ("tool", "c2")],
    ),
    "calls one after the other are several messages": (
        [CALLS[0], OUTPUTS[0], CALLS[1], OUTPUTS[1]],
        [("system", "a"), ("assistant", "", "c1"), ("tool", "c1"), ("assistant", "", "c2"), ("tool", "c2")],
    ),
    "two answers are two messages": ([SAID, SAID], [("system", "a"), ("assistant", "Yes."), ("assistant", "Yes.")]),
}


@pytest.mark.parametrize("case", TURNS)
def test_items_become_messages(case):
    items, expected = TURNS[case]
    chat = chat_request(ResponsesRequest.model_validate({"model": "m", "instructions": "a", "input": items}))
    found = []
    for message in chat.messages:
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        reasoning = [] if message.reasoning_content is None else [message.reasoning_content]
        found.append((message.role, text, *reasoning, *(call.id for call in message.tool_calls or ())))
    assert found == expected


def test_options_become_those_of_a_chat():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}],
        "tools": [ADD],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "max_output_tokens": 9.0,
        "reasoning": {"effort": "low", "summary": "auto"},
        "kv": {"budget": "10%"},
    }
    chat = chat_request(ResponsesRequest.model_validate_json(json.dumps(body)))
    assert chat.messages[0].content[0].type == "image_url" and chat.max_completion_tokens == 9
    assert chat.tools[0].function.name == chat.tool_choice.function.name == "add"
    assert chat.tools[0].function.parameters == PARAMETERS and chat.kv.budget == "10%"
    assert chat.reasoning_effort == "low"
    assert chat.response_format.json_schema.schema_ == schema and chat.response_format.json_schema.strict
    plain = chat_request(ResponsesRequest(model="m", input="w1", text={"format": {"type": "json_object"}}))
    assert plain.response_format.type == "json_object" and plain.response_format.json_schema is None


def test_errors_name_the_members_of_a_response():
    names = {"messages.1.content: x": "input: x", "max_completion_tokens: x": "max_output_tokens: x", "n: x": "n: x"}
    for message, name in names.items():
        assert str(renamed(InputError(message), NAMES)) == name


class Script:
    """A form of answers and its parser, which returns the pieces of a script one at a time."""

    def __init__(self, pieces):
        self._pieces = list(pieces)

    def parser(self):
        return self

    def add(self, text, last=False):
        return [self._pieces.pop(0)] if self._pieces else []


def output_of(pieces, finish="stop"):
    output = OutputItems(Script(pieces), lambda token: b"")
    events = [event for _ in pieces for event in output.add(AnswerPart(0, ""))]
    events += output.add(AnswerPart(0, "", finish=finish))
    for number, event in enumerate(events):
        EVENT.validate_python({**event, "sequence_number": number})
    return output, events


def test_reasoning_text_and_calls_are_items_in_their_order():
    call = [CallBegin(0, "c1", "add"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}")]
    output, events = output_of([Reasoning("Hm"), Reasoning("."), Text("Yes"), *call, CallBegin(1, "c2", "add")])
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in output.items} == {"completed"}
    assert output.items[0]["content"][0]["text"] == "Hm." and output.items[2]["arguments"] == '{"a": 1}'
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)
    reasoned = [*["reasoning_text.delta"] * 2, "reasoning_text.done", "content_part.done", "output_item.done"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:7] == ["output_item.added", "content_part.added", *reasoned]


def test_an_answer_without_text_has_an_empty_message():
    for pieces, finish, kinds in [
        ([], "stop", ["message"]),
        ([Reasoning("Hm")], "stop", ["reasoning", "message"]),
        ([Reasoning("Hm")], "length", ["reasoning"]),
        ([CallBegin(0, "c1", "add")], "stop", ["function_call"]),
    ]:
        output, _ = output_of(pieces, finish)
        assert [item["type"] for item in output.items] == kinds
        assert output.items[-1]["status"] == ("completed" if finish == "stop" else "incomplete")


def response(text, count=1):
    return KeptResponse(text, (), (text,) * count)


def test_stored_responses_expire():
    now = [0.0]
    kept = KeptResponses(seconds=10, clock=lambda: now[0])
    kept.put("a", "r1", response(b"1"))
    now[0] = 9.0
    kept.put("a", "r2", response(b"2"))
    assert kept.get("a", "r1") and kept.get("a", "r2")
    now[0] = 10.0
    assert kept.get("a", "r1") is None and kept.get("a", "r2") and not kept.drop("a", "r1") and kept.drop("a", "r2")


@pytest.mark.parametrize("limits", [{"number": 4}, {"size": 9_000}])
def test_who_stores_most_loses_the_oldest(limits):
    kept = KeptResponses(**limits)
    kept.put("b", "r0", response(b"x" * 900))
    for number in range(20):
        kept.put("a", f"r{number}", response(b"x" * 900))
    assert kept.get("b", "r0") and kept.get("a", "r19") and kept.get("a", "r18") and kept.get("a", "r1") is None
    assert kept.get("b", "r19") is None


CODES = {429: "rate_limit_exceeded", 413: "invalid_prompt", 503: "server_error"}


@pytest.mark.parametrize(("status", "code"), CODES.items())
def test_failures_have_the_codes_of_a_response(status, code):
    body = ResponsesRequest(model="m", input="w1")
    run = ResponseRun(body, AnswerForm(), lambda token: b"", lambda reply: None)
    error, failed = run.failed(Failure(status, "No."))
    EVENT.validate_python(error)
    EVENT.validate_python(failed)
    assert error["message"] == "No." and failed["response"]["error"] == {"code": code, "message": "No."}
