"""Messages over HTTP: tool calls, null members, parts that are no text, control tokens of completions, echoes."""

from __future__ import annotations

import typing

import httpx
import pytest

import call_templates as templates
from kvsieve.errors import InputError
from kvsieve.planning.turns import render
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.messages import template_message, template_tool
from kvsieve.serve.parsers.objects import BareCalls, MarkedCalls
from kvsieve.serve.pieces import WholeAnswer
from kvsieve.serve.prepare import Preparer
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import ChatRequest, CompletionRequest
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer

USER = {"role": "user", "content": "w1 w2"}


@pytest.fixture(scope="module")
def server():
    # The model ends no answer by itself.
    options = ServerOptions(limits=ServerLimits(max_tokens=32))
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as url:

        def ask(path, **body):
            return httpx.post(f"{url}/v1/{path}", json={"model": "tiny", "max_tokens": 1, **body}, timeout=60)

        yield app.state.service.preparer, ask


@pytest.fixture(scope="module")
def ask(server):
    return server[1]


def taken(*messages, **more):
    """Messages and tools of a request as its chat template takes them."""
    request = ChatRequest(model="tiny", messages=list(messages), **more)
    return [template_message(each) for each in request.messages]


def test_calls_keep_their_ids_and_arguments():
    call = {"id": "w12345678", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "w12345678", "content": "w9"}
    messages = taken(USER, answer, result)
    for template in (templates.KIMI, templates.MISTRAL):
        text = render(word_tokenizer(template), messages)
        assert "w12345678" in text and '{"a": 1.0}' in text
    for arguments in (None, "", " "):
        call["function"]["arguments"] = arguments
        (function,) = [each["function"] for each in taken(USER, answer)[1]["tool_calls"]]
        assert function["arguments"] == {} and function["arguments"].text == "{}"
    # No object: the text stays one.
    for arguments in ("[1]", "{broken", "w1"):
        call["function"]["arguments"] = arguments
        assert taken(USER, answer)[1]["tool_calls"][0]["function"]["arguments"] == arguments
    del call["id"]
    assert "id" not in taken(USER, answer)[1]["tool_calls"][0]


def test_tools_keep_null_in_their_parameters():
    parameters = {"type": "object", "properties": {"a": {"default": None, "enum": ["x", None]}}}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": parameters}}
    request = ChatRequest(model="tiny", messages=[USER], tools=[tool])
    assert template_tool(request.tools[0]) == {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_what_an_assistant_refused_is_what_it_said():
    said = {"role": "assistant", "content": None, "refusal": "w7"}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "w8"}]}
    assert [each["content"] for each in taken(said, parts)] == ["w7", "w8"]
    with pytest.raises(InputError, match="the user's message has no content"):
        taken({"role": "user"})


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "images are not read here"),
        ({"type": "input_image", "image_url": "x"}, "images are not read here"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio parts are not read here"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "videos are not read here"),
        ({"type": "file", "file": {"file_id": "x"}}, "files are not read here"),
        ({"type": "thing"}, "such parts are not read here"),
        ({"type": "text"}, "a part of type 'text' has no text"),
    ],
)
def test_parts_that_are_no_text_are_refused_in_their_name(ask, part, told):
    content = [{"type": "text", "text": "w5"}, part]
    for role in ("user", "tool", "system"):
        reply = ask("chat/completions", messages=[USER, {"role": role, "content": content}])
        error = reply.json()["error"]
        assert reply.status_code == 400 and told in error["message"] and error["param"] == "messages"


def nullable(kind: type) -> set[str]:
    """Members of a body that OpenAI's schema lets be null."""
    hints = typing.get_type_hints(kind)
    return {name for name, hint in hints.items() if type(None) in typing.get_args(hint)}


def test_members_that_openai_lets_be_null_may_be_null(ask):
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    for path, kinds, given in (
        ("chat/completions", chats, {"messages": [USER]}),
        ("completions", completions, {"prompt": "w1"}),
    ):
        names = nullable(kinds.CompletionCreateParamsNonStreaming) | nullable(kinds.CompletionCreateParamsStreaming)
        # Those that clients write out although the schema has no null for them.
        names |= {"stream", "user", "kv", "ignore_eos", "top_k"}
        names |= {"tools", "tool_choice", "response_format", "functions"} if "messages" in given else {"parse_special"}
        assert {"stop", "logit_bias", "seed", "n"} < names
        for some in [[name] for name in sorted(names)] + [sorted(names)]:
            reply = ask(path, **{**given, **dict.fromkeys(some)})
            assert reply.status_code == 200, (some, reply.text)
    options = {"stream_options": {"include_usage": None, "include_obfuscation": None}, "kv": {"map": None}}
    assert ask("completions", prompt="w1", stream=True, **options).text.endswith("[DONE]\n\n")
    nothing = dict.fromkeys(("name", "tool_calls", "refusal", "audio", "function_call", "annotations", "tool_call_id"))
    assert ask("chat/completions", messages=[{**USER, **nothing}]).status_code == 200


def test_a_completion_without_a_prompt_begins_a_text(ask):
    told = ask("completions", prompt=None).json()
    assert told["choices"][0]["text"] == ask("completions", prompt=[1]).json()["choices"][0]["text"]


def test_control_tokens_of_completions_are_what_the_tokenizer_makes_of_them(server):
    preparer, _ = server

    def ids(**more):
        (order,) = preparer.completion(CompletionRequest(model="tiny", prompt="w1 [EOS] w2", **more), "")
        return list(order.ids)

    assert ids() == ids(parse_special=True) == ids(parse_special=None) == chat_tokenizer()("w1 [EOS] w2")["input_ids"]
    assert 127 in ids() and 127 not in ids(parse_special=False)
    # A chat's own are those of its template.
    spelled = preparer.chat(ChatRequest(model="tiny", messages=[{"role": "user", "content": "w1 [EOS]"}]), "")
    assert spelled.ids.count(127) == 1 and spelled.ids[-2] == 127


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_as_it_was_given(ask, stream):
    told = ask("completions", prompt=["w1   [EOS]\n w2 ", "w3"], echo=True, stream=stream)
    if stream:
        assert r'"text":"w1   [EOS]\n w2 "' in told.text and '"text":"w3"' in told.text
    else:
        texts = [each["text"] for each in told.json()["choices"]]
        assert texts[0].startswith("w1   [EOS]\n w2 ") and texts[1].startswith("w3 w")
    plain = ask("completions", prompt=[5, 127, 6], echo=True).json()["choices"][0]["text"]
    assert plain.startswith("w2 w3")


BARE = BareCalls(frozenset(["add"]))
ANSWERS = {
    "a person": ('{"name": "Alice", "age": 30}', BARE, None),
    "a person of a tool's name": ('{"name": "add", "age": 30}', BARE, None),
    "a tool nobody offers": ('{"name": "sub", "parameters": {}}', BARE, None),
    "more than an object": ('Sure: {"name": "add", "parameters": {}}', BARE, None),
    "an object where calls are marked": ('{"name": "add", "arguments": {}}', MarkedCalls(), None),
    "a mark where objects are bare": ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', BARE, None),
    "no JSON": ("<tool_call>{broken}</tool_call>", MarkedCalls(), None),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', MarkedCalls(), None),
    "a list": ('<tool_call>[{"name": "add"}]</tool_call>', MarkedCalls(), None),
    "text behind it": ('<tool_call>{"name": "add"} and so on', MarkedCalls(), None),
    "bare": (' {"name": "add", "parameters": {"a": 1}} ', BARE, ("", [("add", '{"a": 1}')])),
    "bare, null": ('{"name": "add", "parameters": null}', BARE, ("", [("add", "{}")])),
    "marked": (
        'Yes.<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>',
        MarkedCalls(),
        ("Yes.", [("add", '{"a": "é"}')]),
    ),
    "null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', MarkedCalls(), ("", [("f", "{}")])),
    "none": ('<tool_call>{"name": "f"}</tool_call>', MarkedCalls(), ("", [("f", "{}")])),
    "a text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        MarkedCalls(),
        ("", [("f", '{"a": 1}')]),
    ),
    "without an end": ('<tool_call>\n{"name": "f", "arguments": {}}\n', MarkedCalls(), ("", [("f", "{}")])),
    "an end within it": (
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>"}}</tool_call>',
        MarkedCalls(),
        ("", [("f", '{"a": "}</tool_call>"}')]),
    ),
    "two, and one that is none": (
        '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{no}</tool_call><tool_call>{"name": "g"}</tool_call>',
        MarkedCalls(),
        ("<tool_call>{no}</tool_call>", [("f", "{}"), ("g", "{}")]),
    ),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_is_a_call_only_in_the_templates_own_form(what):
    text, form, wanted = ANSWERS[what]
    wanted = wanted or (text, [])
    # Whole, and streamed wherever its pieces end.
    for size in (len(text), 1, 3):
        parser = form.parser()
        pieces = [piece for at in range(0, len(text), size) for piece in parser.add(text[at : at + size])]
        answer = WholeAnswer([*pieces, *parser.add("", last=True)])
        assert answer.text.strip() == wanted[0].strip()
        assert [(call.name, call.arguments) for call in answer.calls] == wanted[1]
        assert all(len(call.id) == 9 and call.id.isalnum() for call in answer.calls)


def test_without_tools_an_answer_is_text(server):
    preparer: Preparer = server[0]
    tool = {"type": "function", "function": {"name": "f"}}
    for more in ({}, {"tools": []}, {"tools": [tool], "tool_choice": "none"}, {"tools": [tool]}):
        # The last because this server's template writes no calls.
        assert preparer.chat(ChatRequest(model="tiny", messages=[USER], **more), "").form.calls is None
    with application(build("llama"), word_tokenizer(templates.QWEN), ServerOptions(), "tiny") as app:
        other = app.state.service.preparer
        assert other.chat(ChatRequest(model="tiny", messages=[USER], tools=[tool]), "").form.calls == MarkedCalls()
