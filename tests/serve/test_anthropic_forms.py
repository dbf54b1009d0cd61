"""Anthropic's messages as a chat's, and pieces of answers as its content blocks."""

from __future__ import annotations

import json

import pytest

from kvsieve.decoding.asked import AnswerPart
from kvsieve.errors import InputError
from kvsieve.serve.anthropic.reply import ContentBlocks, content
from kvsieve.serve.anthropic.schema import MessagesRequest
from kvsieve.serve.anthropic.translate import chat_request
from kvsieve.serve.parsers.form import AnswerParser
from kvsieve.serve.pieces import CallArguments, CallBegin, Reasoning, Text


def chat(*messages, **more):
    """The chat request of a body."""
    body = {"model": "tiny", "max_tokens": 9, "messages": list(messages), **more}
    return chat_request(MessagesRequest.model_validate_json(json.dumps(body)), 64)


def said(*messages, **more):
    """Messages of the chat, with texts of parts alone."""
    out = []
    for message in chat(*messages, **more).messages:
        texts = [part.text for part in message.content]
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        more = [part for part in (message.tool_call_id, message.reasoning_content, calls) if part]
        out.append((message.role, texts, *more))
    return out


def text(text):
    return {"type": "text", "text": text}


def message(role, *blocks):
    return {"role": role, "content": list(blocks)}


def test_consecutive_messages_of_a_role_are_one():
    assert said(
        {"role": "user", "content": "a"},
        message("user", text("b"), text("c")),
        {"role": "assistant", "content": "d"},
        message("assistant", text("e")),
        {"role": "user", "content": "f"},
        system=[text("s"), text("t")],
    ) == [("system", ["s", "t"]), ("user", ["a", "b", "c"]), ("assistant", ["d", "e"]), ("user", ["f"])]


def test_a_line_that_changes_with_every_request_is_no_prompt():
    billing = text("x-anthropic-billing-header: cc_version=2.1.1; cch=fa690;")
    user = {"role": "user", "content": billing["text"]}
    assert said(user, system=[billing, text("s")]) == [("system", ["s"]), ("user", [billing["text"]])]
    assert said(user, system=[billing]) == [("user", [billing["text"]])]


def test_calls_results_and_thinking_keep_their_order():
    call = {"type": "tool_use", "id": "toolu_01A", "name": "add", "input": {"a": "é"}}
    answer = message("assistant", {"type": "thinking", "thinking": "h", "signature": ""}, text("x"), call)
    redacted = message("assistant", {"type": "redacted_thinking", "data": "z"}, text("y"))
    result = {"type": "tool_result", "tool_use_id": "toolu_01A", "content": "5"}
    failed = {"type": "tool_result", "tool_use_id": "mine", "content": [text("no")], "is_error": True}
    nothing = {"type": "tool_result", "tool_use_id": "b"}
    user = message("user", text("q"))
    assert said(user, answer, message("user", result, failed, nothing, text("r")), redacted, user) == [
        ("user", ["q"]),
        ("assistant", ["x"], "h", [("01A", "add", '{"a": "é"}')]),
        ("tool", ["5"], "01A"),
        ("tool", ["Error:", "no"], "mine"),
        ("tool", [], "b"),
        ("user", ["r"]),
        ("assistant", ["y"]),
        ("user", ["q"]),
    ]


def test_documents_are_text_and_images_are_data():
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": plain, "title": "Title", "context": "About", "citations": None}
    nested = {"type": "document", "source": {"type": "content", "content": [text("one"), text("two")]}}
    found = {"type": "search_result", "source": "https://x", "title": "Found", "content": [text("it")]}
    ((_, texts),) = said(message("user", document, nested, found))
    assert texts == ["Title\nAbout\nbody", "one\ntwo", "Found\nhttps://x\nit"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    for blocks in ([image], [result]):
        (part,) = chat(message("user", *blocks)).messages[0].content
        assert part.type == "image_url"
    with pytest.raises(InputError, match="a document's blocks are text"):
        said(message("user", {"type": "document", "source": {"type": "content", "content": [image]}}))


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tools_and_choices(choice, wanted):
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}
    choice = {**choice, "disable_parallel_tool_use": True} if choice["type"] != "none" else choice
    request = chat({"role": "user", "content": "q"}, tools=[tool], tool_choice=choice).model_dump(exclude_none=True)
    assert request["tool_choice"] == wanted and request.get("parallel_tool_calls", wanted == "none") is (
        wanted == "none"
    )
    function = {"name": "add", "description": 'Adds.\nExample of its input: {"a": 1}', "parameters": {"type": "object"}}
    assert request["tools"] == [{"type": "function", "function": function}]


def test_rules_of_sampling_and_a_schema_of_the_answer():
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    user = {"role": "user", "content": "q"}
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "stop_sequences": ["z"], "kv": {"protect": [[0, 4], 1]}}
    request = chat(user, **given, output_config={"format": form, "effort": "low"})
    assert (request.temperature, request.top_p, request.top_k, request.stop) == (0.5, 0.9, 0, ["z"])
    assert request.max_tokens == 9 and request.kv.protect == [(0, 4), 1]
    assert request.response_format.json_schema.schema_ == schema
    assert chat(user, output_format=form).response_format == request.response_format
    assert chat(user, max_tokens=100, stop_sequences=[]).max_tokens == 64


def test_reasoning_is_asked_of_the_template():
    def options(**more):
        request = chat({"role": "user", "content": "q"}, **more)
        return request.chat_template_kwargs, request.reasoning_effort

    for kind, reasons in {"enabled": True, "disabled": False}.items():
        asked = {"enable_thinking": reasons, "thinking": reasons}
        assert options(thinking={"type": kind}, output_config={"effort": "low"}) == (asked, "low")
    assert options(thinking={"type": "adaptive"}, output_config={"effort": "max"}) == (None, "xhigh")


class Pieces(AnswerParser):
    """Pieces by their numbers, which are the answer's text."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def add(self, text, last=False):
        return [self.pieces[int(number)] for number in text]


def events(*pieces, size=100, **how):
    blocks = ContentBlocks(Pieces(*pieces), **how)
    numbers = "".join(map(str, range(len(pieces))))
    parts = [AnswerPart(0, numbers[at : at + size]) for at in range(0, len(numbers), size)]
    return [event for part in [*parts, AnswerPart(0, "", finish="stop")] for event in blocks.add(part)]


ANSWERS = {
    "thinking, a text and calls": (
        [
            Reasoning("h"),
            Reasoning("m"),
            Text("\n"),
            Text("Hi"),
            Text("\n"),
            CallBegin(0, "a", "f"),
            CallArguments(0, '{"x"'),
            CallArguments(0, ": 1}"),
            Text("\n"),
            CallBegin(1, "b", "g"),
        ],
        [
            {"type": "thinking", "thinking": "hm", "signature": "kvsieve"},
            {"type": "text", "text": "\nHi\n"},
            {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "toolu_b", "name": "g", "input": {}},
        ],
    ),
    "arguments that are no object": (
        [CallBegin(0, "a", "f"), CallArguments(0, " [1,"), CallArguments(0, "2]")],
        [{"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"arguments": [1, 2]}}],
    ),
    "arguments that are no JSON": (
        [CallBegin(0, "a", "f"), CallArguments(0, "x = 1")],
        [{"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"arguments": "x = 1"}}],
    ),
    "arguments that were cut off": (
        [CallBegin(0, "a", "f"), CallArguments(0, '{"x": 1, "y": "w')],
        [{"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"x": 1}}],
    ),
    "white space alone": ([Text(" "), Text("\n")], []),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_pieces_are_the_same_blocks_wherever_they_come(what):
    pieces, wanted = ANSWERS[what]
    for size in (1, 2, 100):
        found = events(*pieces, size=size)
        assert content(found) == wanted
        # Blocks do not overlap, and are numbered from 0.
        marks = [(event["type"], event["index"]) for event in found if event["type"] != "content_block_delta"]
        assert marks == [(f"content_block_{end}", number) for number in range(len(wanted)) for end in ("start", "stop")]


def test_thinking_can_be_left_out():
    (block, answer) = content(events(Reasoning("h"), Text("Hi"), shows_thinking=False))
    assert block == {"type": "thinking", "thinking": "", "signature": "kvsieve"} and answer["text"] == "Hi"
