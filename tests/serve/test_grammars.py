"""Structured output over HTTP: formats of chats, grammars of both endpoints, and what is refused."""

from __future__ import annotations

import json
import re

import httpx
import jsonschema
import openai
import pydantic
import pytest

from grammar_bombs import GRAMMARS, member, sources
from kvsieve.errors import InputError
from kvsieve.planning.drafts import as_draft
from kvsieve.planning.grammars import Grammar
from kvsieve.serve.grammars import Grammars
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import ChatRequest
from served_apps import listening
from tiny_models import build
from toy_bytes import byte_chats

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc", 3]},
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "maximum": 99},
    },
    "required": ["kind", "ok", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
QUESTION = [{"role": "user", "content": "Say it."}]
SAMPLED = {"model": "tiny", "max_tokens": 300, "temperature": 1}


@pytest.fixture(scope="module")
def url():
    model = build("llama", vocab_size=288, max_position_embeddings=2048)
    options = ServerOptions(
        limits=ServerLimits(chunk=64, seconds=600), draft=as_draft("lookup:tokens=3:ngram=1:adapt=false")
    )
    with application(model, byte_chats(), options, "tiny") as app, listening(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def check(text):
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("draft", ["none", "lookup:tokens=3"])
def test_answers_of_chats_match_a_schema(client, draft):
    body = {**SAMPLED, "messages": QUESTION, "response_format": FORMAT, "extra_body": {"kv": {"draft": draft}}}
    reply = client.chat.completions.create(**body, n=3, seed=5, logprobs=True)
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    for choice in reply.choices:
        check(choice.message.content)
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    texts = [""] * 3
    for chunk in client.chat.completions.create(**body, n=3, seed=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in reply.choices] and len(set(texts)) > 1


def test_any_object_and_true_as_a_schema(client):
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
        choice = client.chat.completions.create(**body, response_format=form).choices[0]
        assert choice.finish_reason == "length" or json.loads(choice.message.content) is not Ellipsis
        assert form["type"] != "json_object" or choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("more", "pattern"),
    [({"regex": "[ab]{3}!"}, "[ab]{3}!"), ({"grammar": 'start: "<" /[0-9]{2}/ ">"'}, "<[0-9]{2}>")],
)
def test_both_endpoints_take_expressions_and_grammars(client, more, pattern):
    chat = client.chat.completions.create(**SAMPLED, messages=QUESTION, extra_body=more).choices[0]
    assert re.fullmatch(pattern, chat.message.content) and chat.finish_reason == "stop"
    reply = client.completions.create(**SAMPLED, prompt=["Say it:", "And"], n=2, extra_body=more)
    assert len(reply.choices) == 4
    for choice in reply.choices:
        assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop"
    ignoring = client.completions.create(**SAMPLED, prompt="Say", extra_body={**more, "ignore_eos": True}).choices[0]
    assert re.fullmatch(pattern, ignoring.text) and ignoring.finish_reason == "stop"


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"regex": "a", "response_format": FORMAT}, "regex and response_format are both", None),
        ({"response_format": {"type": "json_schema"}}, "needs the member json_schema", "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type"),
        ({"grammar": "start: %%"}, "grammar: the grammar cannot be compiled", "grammar"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "a schema has no effect", "response_format"),
        ({"response_format": {**FORMAT, "type": "text"}}, "a json_schema has no effect", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "shema": SCHEMA}}},
            "no such parameter",
            "response_format.json_schema.shema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": SCHEMA}}]},
            "no such parameter",
            "tools.0.function.paramters",
        ),
        ({"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "a schema has no effect", "text.format"),
        (
            {"input": "Say it.", "tools": [{"type": "function", "name": "f", "input_schema": SCHEMA}]},
            "no such parameter",
            "tools.0.input_schema",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(url, more, message, param):
    path, body = ("chat/completions", {**SAMPLED, "messages": QUESTION, **more})
    if more.keys() & {"text", "input"}:
        path, body = ("responses", {"model": "tiny", "input": "Say it.", **more})
    reply = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400 and message in error["message"] and error["param"] == param, error


class Parsed(pydantic.BaseModel):
    ok: bool


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_what_openais_client_has_parsed_can_be_sent_back(client):
    chat = client.chat.completions.parse(**SAMPLED, messages=QUESTION, response_format=Parsed).choices[0].message
    assert isinstance(chat.parsed, Parsed)
    assert client.chat.completions.create(model="tiny", max_tokens=2, messages=[*QUESTION, chat, *QUESTION]).choices
    said = client.responses.parse(model="tiny", input="Say it.", max_output_tokens=60, text_format=Parsed)
    assert isinstance(said.output_parsed, Parsed)
    again = client.responses.create(model="tiny", max_output_tokens=2, input=[*QUESTION, *said.output, *QUESTION])
    assert again.output


@pytest.mark.parametrize("name", ["regex", "grammar", "response_format"])
def test_a_forced_call_is_the_whole_answer(name):
    grammars = Grammars(byte_chats())
    given = {"regex": "a|b", "grammar": 'start: "a"', "response_format": FORMAT}[name]
    request = ChatRequest(model="tiny", messages=QUESTION, **{name: given})

    def calls():
        return 'start: "{}"'

    try:
        if name == "response_format":
            forced = grammars.compiled("tool_choice", lambda: Grammar.lark(calls()))
            assert grammars.of(request, calls=calls) is forced
            return
        with pytest.raises(InputError, match=f"tool_choice and {name} are both the form of the whole answer"):
            grammars.of(request, calls=calls)
    finally:
        grammars.close()


def test_a_grammar_that_ends_the_trying_process_ends_nothing_else(monkeypatch):
    grammars = Grammars(byte_chats())
    try:
        with pytest.raises(InputError, match="grammar: the grammar takes more than"):
            grammars.compiled("grammar", lambda: Grammar.lark(GRAMMARS["chain"]))
        found = grammars.compiled("regex", lambda: Grammar.regex("a|b"))
        with pytest.raises(InputError, match="regex: the grammar cannot be compiled: .*unclosed group"):
            grammars.compiled("regex", lambda: Grammar.regex("(a"))
        with pytest.raises(InputError, match="no answer matches it"):
            grammars.compiled("response_format", lambda: Grammar.json_schema({"$ref": "#"}))
        # What is compiled is not tried again.
        grammars.close()
        monkeypatch.setattr(grammars, "_started", None)
        assert grammars.compiled("regex", lambda: Grammar.regex("a|b")) is found
    finally:
        grammars.close()


@pytest.mark.parametrize("name", sources())
def test_bombs_are_refused_or_answered(url, name, monkeypatch):
    monkeypatch.setattr("kvsieve.serve.grammars._SECONDS", 2)
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 3, **member(name)}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{url}/health").status_code == 200
