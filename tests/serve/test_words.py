"""Text over HTTP: stops and likelihoods by the characters of the whole answer, whatever tokens they are of."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest

from kvsieve.lab.client import ServerClient
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from toy_bytes import byte_level, sentence_piece
from toy_tools import follows

TEXT = "a😀é b!"
ASKED = {"chat/completions": {"messages": [{"role": "user", "content": "x"}]}, "completions": {"prompt": "x"}}


@contextlib.contextmanager
def serving(model, tokenizer, template="{% for m in messages %}{{ m.content }}{% endfor %}"):
    """Asks a live server: a path, and members of the body."""
    tokenizer.chat_template = template
    with application(model, tokenizer, ServerOptions(), "tiny") as app, listening(app) as url:

        def ask(path, **body):
            reply = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", "max_tokens": 12, **body}, timeout=60)
            assert reply.status_code == 200, reply.text
            return reply

        yield ask


@pytest.fixture(scope="module")
def level():
    """A model of bytes that writes TEXT behind an x, then a special token and a full stop."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
    script = [*tokenizer(f"x{TEXT}")["input_ids"], 256, *tokenizer(".")["input_ids"]]
    assert len(set(script)) == len(script)
    with serving(follows([script], 257), tokenizer) as ask:
        yield ask


@pytest.fixture(scope="module")
def piece():
    """A model of SentencePiece's words that writes " world a!ab" behind a word, and behind a chat."""
    tokenizer = sentence_piece()
    script = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world", "▁a", "!", "ab", "</s>"])
    with serving(follows([script, [1, script[1]]], len(tokenizer)), tokenizer, "<s>") as ask:
        yield ask, script


def said(choice) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_bytes_of_likelihoods_are_those_of_the_tokens(level):
    told = level("chat/completions", **ASKED["chat/completions"], logprobs=True, top_logprobs=3).json()["choices"][0]
    listed = told["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in listed) == f"{TEXT}<|stop|>.".encode()
    assert [each["token"] for each in listed[:3]] == ["a", r"\xf0", r"\x9f"] and said(told) == f"{TEXT}."
    for each in listed:
        # The likeliest is the one that was chosen.
        first = {name: each["top_logprobs"][0][name] for name in ("token", "logprob", "bytes")}
        assert first == {name: each[name] for name in first} and len(each["top_logprobs"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_completions_name_parts_of_characters_and_tell_where_tokens_begin(level, stream):
    reply = level("completions", prompt="x", logprobs=2, stream=stream)
    if stream:
        choices = [json.loads(line[6:])["choices"][0] for line in reply.text.splitlines() if line.startswith("data: {")]
        parts = [each["logprobs"] for each in choices if each["logprobs"]]
        told = {name: [one for part in parts for one in part[name]] for name in parts[0]}
        text = "".join(each["text"] for each in choices)
        assert not any("\ufffd" in each["text"] for each in choices)
    else:
        (choice,) = reply.json()["choices"]
        told, text = choice["logprobs"], choice["text"]
    emoji = [rf"bytes:\x{byte:02x}" for byte in "😀".encode()]
    assert told["tokens"] == ["a", *emoji, r"bytes:\xc3", r"bytes:\xa9", " ", "b", "!", "<|stop|>", "."]
    assert told["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 3, 4, 5, 6, 6] and text == f"{TEXT}."
    assert all(len(each) == 2 for each in told["top_logprobs"])


BREAKS = "x\u2028y\u2029z\x85"


def test_line_breaks_of_unicode_end_no_line_of_a_stream(level):
    """Clients of httpx end lines at them."""
    reply = level("completions", prompt=BREAKS, echo=True, max_tokens=1, stream=True)
    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]" and json.loads(lines[0])["choices"][0]["text"] == BREAKS


def test_the_own_client_reads_them_from_any_server(monkeypatch):
    def reply(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        chunks = [json.dumps({"choices": [{"text": part}]}, ensure_ascii=False) for part in (BREAKS, "!")]
        content = "".join(f"data: {chunk}\r\n\r\n" for chunk in [*chunks, "[DONE]"]).encode()
        # Cut within characters.
        return httpx.Response(200, content=(content[at : at + 5] for at in range(0, len(content), 5)))

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **given: client(transport=httpx.MockTransport(reply), **given))
    assert ServerClient("http://server").complete("x", 2).text == f"{BREAKS}!"


@pytest.mark.parametrize(
    ("stop", "left"), [("😀", "a"), ("é b", "a😀"), ("!", "a😀é b"), ("<|stop|>", TEXT), ("x", f"{TEXT}.")]
)
@pytest.mark.parametrize("path", ASKED)
def test_a_stop_is_found_across_tokens_and_named_by_a_special_one(level, path, stop, left):
    (choice,) = level(path, **ASKED[path], stop=stop).json()["choices"]
    assert (said(choice), choice["finish_reason"]) == (left, "length" if stop == "x" else "stop")


@pytest.mark.parametrize(
    ("stop", "left"), [("a", ""), ("😀", "a"), ("é b", "a😀"), ("!", "a😀é b"), ("<|stop|>", TEXT)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_is_no_part_of_the_likelihoods(level, stop, left, stream):
    reply = level("chat/completions", **ASKED["chat/completions"], stop=stop, logprobs=True, stream=stream)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.text]
    listed = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
    tokens = [token for part in listed if part for token in part["content"]]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == left


def test_a_completion_begins_with_the_space_of_its_first_word(piece):
    ask, script = piece
    (choice,) = ask("completions", prompt=script[:1], logprobs=0).json()["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert choice["text"] == " world a!ab" == "".join(tokens) and tokens[0] == " world"
    assert choice["logprobs"]["text_offset"] == [0, 6, 8, 9]
    assert said(ask("completions", prompt=script[:1], stop=" world").json()["choices"][0]) == ""
    # An answer of a chat is a text of its own.
    assert said(ask("chat/completions", **ASKED["chat/completions"]).json()["choices"][0]) == "world a!ab"
