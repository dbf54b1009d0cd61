"""The same conversation over each protocol: the same text, calls, costs and ends."""

from __future__ import annotations

import json
from dataclasses import dataclass

import anthropic
import httpx
import openai
import pytest

from kvsieve.serve.anthropic.schema import MessagesRequest
from kvsieve.serve.anthropic.translate import chat_request as of_messages
from kvsieve.serve.responses.schema import ResponsesRequest
from kvsieve.serve.responses.translate import chat_request as of_response
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import ChatRequest
from served_apps import listening
from toy_tools import RESULT, scripted, tools_tokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
QUESTION = "w1 w2 w3"


@dataclass
class Answer:
    """An answer in no protocol's form. tokens: of the prompt and of the answer."""

    text: str
    calls: list[tuple[str, dict]]
    tokens: tuple[int, int]
    end: str


@pytest.fixture(scope="module")
def url():
    tokenizer = tools_tokenizer()
    with application(scripted(tokenizer), tokenizer, ServerOptions(), "scripted") as app, listening(app) as address:
        yield f"{address}/v1"


def by_chat(url, has_result, limit, stream):
    messages = [{"role": "user", "content": QUESTION}]
    if has_result:
        function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        call = {"id": "call00001", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "w4", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call00001", "content": "5"})
    tools = [{"type": "function", "function": FUNCTION}]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        if stream:
            with client.chat.completions.stream(
                model="scripted",
                messages=messages,
                tools=tools,
                max_completion_tokens=limit,
                stream_options={"include_usage": True},
            ) as chunks:
                for _ in chunks:
                    pass
                reply = chunks.current_completion_snapshot
        else:
            reply = client.chat.completions.create(
                model="scripted", messages=messages, tools=tools, max_completion_tokens=limit
            )
    (choice,) = reply.choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    tokens = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return Answer((choice.message.content or "").strip(), calls, tokens, choice.finish_reason)


def by_responses(url, has_result, limit, stream):
    items = [{"role": "user", "content": QUESTION}]
    if has_result:
        call = {"type": "function_call", "call_id": "call00001", "name": "add", "arguments": '{"a": 2, "b": 3}'}
        items += [{"role": "assistant", "content": "w4"}, call]
        items.append({"type": "function_call_output", "call_id": "call00001", "output": "5"})
    asked = {"model": "scripted", "input": items, "tools": [{"type": "function", "strict": None, **FUNCTION}]}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        if stream:
            *_, last = client.responses.create(**asked, max_output_tokens=limit, stream=True)
            reply = last.response
        else:
            reply = client.responses.create(**asked, max_output_tokens=limit)
    calls = [(item.name, json.loads(item.arguments)) for item in reply.output if item.type == "function_call"]
    end = "length" if reply.status == "incomplete" else "tool_calls" if calls else "stop"
    return Answer(reply.output_text.strip(), calls, (reply.usage.input_tokens, reply.usage.output_tokens), end)


def by_messages(url, has_result, limit, stream):
    messages = [{"role": "user", "content": QUESTION}]
    if has_result:
        call = {"type": "tool_use", "id": "call00001", "name": "add", "input": {"a": 2, "b": 3}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "w4"}, call]})
        result = {"type": "tool_result", "tool_use_id": "call00001", "content": "5"}
        messages.append({"role": "user", "content": [result]})
    tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    asked = {"model": "scripted", "messages": messages, "tools": tools, "max_tokens": limit}
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**asked)
    text = "".join(block.text for block in reply.content if block.type == "text")
    calls = [(block.name, block.input) for block in reply.content if block.type == "tool_use"]
    prompt = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    end = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[reply.stop_reason]
    return Answer(text.strip(), calls, (prompt, reply.usage.output_tokens), end)


PROTOCOLS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}
# Whether the call and its result are part of the conversation, the longest answer, and the answer.
CASES = {
    "a call": (False, 20, ("Let_me_see.", [("add", {"a": 2, "b": 3})], "tool_calls")),
    "an answer": (True, 20, ("The sum is 5.", [], "stop")),
    "a cut answer": (True, 2, ("The sum", [], "length")),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", CASES)
def test_protocols_agree(url, case, protocol):
    has_result, limit, expected = CASES[case]
    reference = by_chat(url, has_result, limit, stream=False)
    for stream in (False, True):
        answer = PROTOCOLS[protocol](url, has_result, limit, stream)
        assert answer == reference and (answer.text, answer.calls, answer.end) == expected


SAID = [{"role": "user", "content": QUESTION}]
NEEDED = {
    "chat/completions": {"messages": SAID},
    "completions": {"prompt": QUESTION},
    "responses": {"input": QUESTION},
    "messages": {"messages": SAID, "max_tokens": 3},
}
UNSUPPORTED = {
    "chat/completions": [{"functions": [{"name": "add"}]}, {"prediction": {"type": "content", "content": "x"}}],
    "completions": [{"suffix": "x"}],
    "responses": [{"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}],
    "messages": [{"container": "c"}, {"inference_geo": "us"}],
}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_a_member_that_must_be_absent_is_refused_by_name_with_what_to_do(url, path):
    for member in UNSUPPORTED[path]:
        reply = httpx.post(f"{url}/{path}", json={"model": "scripted", **NEEDED[path], **member}, timeout=60)
        (name,) = member
        message = reply.json()["error"]["message"]
        assert (reply.status_code, message) == (400, f"{name}: not supported here; leave it out")


FORM = {"type": "json_schema", "schema": {"type": "object"}}
ASKED = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def with_image(kind, members, name="messages"):
    return {name: [{"role": "user", "content": [{"type": kind, **members}]}]}


IN_OWN_NAMES = {
    "two limits": ("chat/completions", {"max_completion_tokens": 3}, ("max_tokens: 2 ", "max_completion_tokens=3")),
    "two forms": (
        "messages",
        {"output_format": FORM, "output_config": {"format": {**FORM, "schema": {}}}},
        ("output_format: ", "output_config.format"),
    ),
    "an image": ("chat/completions", with_image("image_url", {"image_url": {"url": "data:"}}), ("'image_url'",)),
    "Anthropic's image": ("messages", with_image("image", {"source": SOURCE}), ("of type 'image' out",)),
    "OpenAI's new image": (
        "responses",
        with_image("input_image", {"image_url": "data:"}, "input"),
        ("of type 'input_image' out",),
    ),
    "a kind of file": (
        "messages",
        with_image("image", {"source": {**SOURCE, "media_type": "image/bmp"}}),
        ("messages.0.content: an image's source.media_type is image/png, ", "got 'image/bmp'"),
    ),
}


@pytest.mark.parametrize("case", IN_OWN_NAMES)
def test_refusals_name_the_members_of_their_protocol(url, case):
    path, members, words = IN_OWN_NAMES[case]
    asked = {} if path == "responses" else ASKED
    reply = httpx.post(f"{url}/{path}", json={"model": "scripted", **asked, **members}, timeout=60)
    assert reply.status_code == 400
    assert all(part in reply.json()["error"]["message"] for part in words), reply.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("span", [[0, 10**6], [5, 2], [-3, -1]])
def test_a_span_outside_of_the_prompt_is_refused_before_a_stream_begins(url, span, stream):
    body = {"model": "scripted", "prompt": QUESTION, "kv": {"protect": [span]}, "stream": stream}
    reply = httpx.post(f"{url}/completions", json=body, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "kv.protect"


def many_calls(protocol, count):
    """The chat of a turn with this many calls, as every protocol writes it."""
    function = {"name": "add", "arguments": "{}"}
    if protocol == "messages":
        used = [{"type": "tool_use", "id": f"c{each}", "name": "add", "input": {}} for each in range(count)]
        turns = [*SAID, {"role": "assistant", "content": used}, *SAID]
        return of_messages(MessagesRequest(model="scripted", messages=turns, max_tokens=3), 64)
    if protocol == "responses":
        called = [{"type": "function_call", "call_id": f"c{each}", **function} for each in range(count)]
        return of_response(ResponsesRequest(model="scripted", input=[*SAID, *called, *SAID]))
    calls = [{"id": f"c{each}", "type": "function", "function": function} for each in range(count)]
    turns = [*SAID, {"role": "assistant", "tool_calls": calls}, *SAID]
    return ChatRequest(model="scripted", messages=turns)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_turn_may_have_many_calls(protocol):
    assert len(many_calls(protocol, 101).messages[1].tool_calls) == 101


@pytest.fixture(scope="module")
def controlled():
    """A server of a model that writes "The sum is 5.", in which "sum" is a control token."""
    tokenizer = tools_tokenizer(controls=["sum"])
    with application(scripted(tokenizer), tokenizer, ServerOptions(), "scripted") as app, listening(app) as address:
        yield f"{address}/v1"


CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RESULTS = {
    "messages": [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "5"},
    ]
}
USED = {
    "messages": [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call00001", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": "5"}]},
    ]
}
STOPPED = {
    "chat/completions": (RESULTS, "stop"),
    "chat/completions, ignoring the end": ({**RESULTS, "ignore_eos": True}, "stop"),
    "completions": ({"prompt": RESULT}, "stop"),
    "completions, ignoring the end": ({"prompt": RESULT, "ignore_eos": True}, "stop"),
    "messages": (USED, "stop_sequences"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_control_token_that_is_a_stop_ends_the_answer_and_is_named(controlled, case):
    more, member = STOPPED[case]
    body = {"model": "scripted", "max_tokens": 6, **more}
    path = case.partition(",")[0]
    plain, stopped = (
        httpx.post(f"{controlled}/{path}", json={**body, **stops}, timeout=60).json()
        for stops in ({}, {member: ["sum"]})
    )
    if path == "messages":
        found = [(one["content"][0]["text"], one["stop_reason"], one["stop_sequence"]) for one in (plain, stopped)]
        ends = ("end_turn", None), ("stop_sequence", "sum")
    else:
        choices = [one["choices"][0] for one in (plain, stopped)]
        texts = [one["message"]["content"] if "message" in one else one["text"] for one in choices]
        found = [(text, one["finish_reason"]) for text, one in zip(texts, choices, strict=True)]
        ends = ("length" if "ignore_eos" in more else "stop",), ("stop",)
    assert found[0][0].split()[:3] == ["The", "is", "5."] and found[1][0].split() == ["The"]
    assert tuple(one[1:] for one in found) == ends
