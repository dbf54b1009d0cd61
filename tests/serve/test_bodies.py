"""Bodies of requests: bounded before they are parsed, in time, and at nobody else's cost."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import random
import socket
import threading

import httpx
import pytest

from kvsieve.serve import guards
from kvsieve.serve.app import create_app
from kvsieve.serve.bodies import DEEPEST, MOST_MEMBERS, MOST_VALUES, JsonShape
from kvsieve.serve.failures import Failure
from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.replies import json_text
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import CompletionRequest
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer

SAID = b'{"role":"user","content":"w1"}'
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served():
    limits = ServerLimits(chunk=24, max_tokens=64)
    options = ServerOptions(limits=limits, store_memory="0")
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        yield url, app


def sent(url, more: bytes, path="/v1/completions", **how):
    """The reply to a body with some members beside the usual."""
    content = b'{"model":"tiny","max_tokens":2,' + more + b"}"
    return httpx.post(f"{url}{path}", content=content, headers=JSON, timeout=60, **how)


def counted(value) -> tuple[int, int, int]:
    """Values, members with lists and objects, and nesting of what a JSON text holds."""
    if isinstance(value, dict):
        parts, own = list(value.values()), len(value)
    elif isinstance(value, list):
        parts, own = value, 0
    else:
        return 0, 0, 0
    found = [counted(each) for each in parts]
    commas = max(len(parts) - 1, 0)
    return (
        1 + commas + sum(each[0] for each in found),
        1 + own + sum(each[1] for each in found),
        1 + max((each[2] for each in found), default=0),
    )


def drawn(draw: random.Random, depth: int = 0):
    if depth > 4 or draw.random() < 0.3:
        return draw.choice([1, None, "", "a,b", '"', "\\", '\\"[{', "]:", "é\n,", "\\\\"])
    if draw.random() < 0.5:
        return [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {f"{number}{draw.choice(['', ',', chr(34), chr(92)])}": drawn(draw, depth + 1) for number in range(3)}


def test_a_shape_is_counted_as_a_parser_would_wherever_the_bytes_are_cut():
    draw = random.Random(0)
    for _ in range(60):
        value = drawn(draw)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        for step in (1, 2, 3, 7, len(text)):
            shape, depths = JsonShape(), []
            for begin in range(0, len(text), step):
                shape.add(text[begin : begin + step])
                depths.append(shape.depth)
            found = shape.values, shape.members
            assert found == counted(value)[:2] and shape.depth == 0
            assert step > 1 or max(depths) == counted(value)[2]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"[" * (DEEPEST + 1), 400),
        (b"[" + b"1," * (MOST_VALUES + 1), 413),
        (b"[" + b"{}," * (MOST_MEMBERS + 1), 413),
        (b"{" + b'"a":1,' * (MOST_MEMBERS + 1), 413),
    ],
)
def test_a_shape_that_no_request_needs_is_refused_before_its_end(text, status):
    shape = JsonShape()
    with pytest.raises(Failure) as failed:
        shape.add(text)
    assert failed.value.status == status
    JsonShape().add(b'"' + text + b'"')


WRONG = {
    "nulls among token ids": ("/v1/completions", b'"prompt":[' + b"null," * 60_000 + b"5]", 400),
    "a null behind token ids": ("/v1/completions", b'"prompt":[' + b"5," * 60_000 + b"null]", 400),
    "numbers as messages": ("/v1/chat/completions", b'"messages":[' + b"1," * 60_000 + b"1]", 400),
    "members by the thousand": (
        "/v1/completions",
        b'"prompt":"w1",' + b",".join(b'"%d":0' % n for n in range(60_000)),
        413,
    ),
    "unknown members": ("/v1/completions", b'"prompt":"w1",' + b",".join(b'"%d":0' % n for n in range(9_000)), 400),
    "a member with a long name": ("/v1/completions", b'"prompt":"w1","' + b"k" * 1_000_000 + b'":1', 400),
    "a long model": ("/v1/completions", b'"prompt":"w1","model":"' + b"k" * 1_000_000 + b'"', 400),
    "a deep tool": (
        "/v1/chat/completions",
        b'"messages":[%b],"tools":[{"type":"function","function":{"name":"f","parameters":%b1%b}}]'
        % (SAID, b'{"a":' * 900, b"}" * 900),
        400,
    ),
    "deep arguments": (
        "/v1/chat/completions",
        b'"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"%b1%b"}}]}]'
        % (b'{\\"a\\":' * 900, b"}" * 900),
        400,
    ),
    "arguments of many values": (
        "/v1/chat/completions",
        b'"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":[%b1]}"}}]}]'
        % (b"1," * (MOST_VALUES + 1)),
        413,
    ),
    "a bias of many digits": ("/v1/completions", b'"prompt":"w1","logit_bias":{"' + b"9" * 5000 + b'":1}', 400),
    "a bias of other digits": ("/v1/completions", '"prompt":"w1","logit_bias":{"٣":1}'.encode(), 400),
    "an integer of many digits": ("/v1/completions", b'"prompt":"w1","n":' + b"9" * 5000, 400),
    "no number": ("/v1/completions", b'"prompt":"w1","temperature":NaN', 400),
    "an endless number": ("/v1/completions", b'"prompt":"w1","presence_penalty":-Infinity', 400),
    "no number in a tool": (
        "/v1/chat/completions",
        b'"messages":[%b],"tools":[{"type":"function","function":{"name":"f","parameters":{"a":[1, -Infinity]}}}]'
        % SAID,
        400,
    ),
    "true among token ids": ("/v1/completions", b'"prompt":[5,true]', 400),
    "a fraction among token ids": ("/v1/completions", b'"prompt":[[5],[6.0]]', 400),
    "a number as text": ("/v1/completions", b'"prompt":"w1","max_tokens":"5"', 400),
    "true as a number": ("/v1/completions", b'"prompt":"w1","n":true', 400),
    "half a character": ("/v1/completions", b'"prompt":"w1 \\ud83d"', 400),
    "no UTF-8": ("/v1/completions", b'"prompt":"w1 \xff"', 400),
    "cut off": ("/v1/completions", b'"prompt":"w1', 400),
}


@pytest.mark.parametrize("what", WRONG)
def test_bodies_of_no_use_are_refused_in_few_words(served, what):
    path, more, status = WRONG[what]
    reply = sent(served[0], more, path)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"] and len(reply.content) < 3000


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json ; charset=utf-8"])
def test_a_content_type_is_taken_by_its_meaning(served, kind):
    body = json.dumps({"model": "tiny", "prompt": "w1", "max_tokens": 1})
    for given, status in ((kind, 200), (f"text/plain; {kind}", 415), ("", 415)):
        headers = {"Content-Type": given} if given else {}
        assert httpx.post(f"{served[0]}/v1/completions", content=body, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_compressed_body_is_refused_as_one(served, path):
    body = gzip.compress(json.dumps({"model": "tiny", "prompt": "w1", "max_tokens": 1}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = httpx.post(f"{served[0]}/v1/{path}", content=body, headers=headers)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 415 and "Content-Encoding is 'gzip'; send it uncompressed" in message


def test_parsing_a_body_makes_nobody_wait(served, monkeypatch):
    begun, on = threading.Event(), threading.Event()
    validate = CompletionRequest.model_validate_json

    def slow(data):
        begun.set()
        assert on.wait(60)
        return validate(data)

    monkeypatch.setattr(CompletionRequest, "model_validate_json", slow)
    found = []
    asking = threading.Thread(target=lambda: found.append(sent(served[0], b'"prompt":"w1"').status_code))
    asking.start()
    assert begun.wait(60) and httpx.get(f"{served[0]}/health").status_code == 200
    on.set()
    asking.join()
    assert found == [200]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_writing_a_reply_makes_nobody_wait(served, monkeypatch, path):
    begun, on = threading.Event(), threading.Event()
    service = served[1].state.service
    preparer, spelled = copy.copy(service.preparer), service.preparer.token_bytes

    def slow(token):
        begun.set()
        assert on.wait(60)
        return spelled(token)

    preparer.token_bytes = slow
    more = b'"prompt":"w1","logprobs":2' if path == "/v1/completions" else b'"messages":[%b],"logprobs":true' % SAID
    with listening(create_app(dataclasses.replace(service, preparer=preparer))) as url:
        found = []
        asking = threading.Thread(target=lambda: found.append(sent(url, more, path)))
        asking.start()
        assert begun.wait(60) and httpx.get(f"{url}/health").status_code == 200
        on.set()
        asking.join()
    assert found[0].status_code == 200 and found[0].json()["choices"][0]["logprobs"]


def test_json_is_the_same_item_by_item():
    value = {"a": [{"b": [1.5, None, 'ä"\n'], "c": {}}, [], "d", True], "e": {"f": {"g": {"h": [[[1]]]}}}}
    whole = json_text(value)
    assert json.loads(whole) == value and {json_text(value, depth) for depth in range(9)} == {whole}


def test_decoding_waits_for_no_tokenizing(served, monkeypatch):
    url, app = served
    begun, on = threading.Event(), threading.Event()
    preparer = app.state.service.preparer
    tokenizer = preparer.tokenizer

    class Slow:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def __call__(self, *given, **how):
            begun.set()
            assert on.wait(60)
            return tokenizer(*given, **how)

    monkeypatch.setattr(preparer, "tokenizer", Slow())
    asking = threading.Thread(target=lambda: sent(url, b'"prompt":"w1 w2"'))
    asking.start()
    assert begun.wait(60)
    told = sent(url, b'"prompt":[5,6,7],"logprobs":2').json()
    assert len(told["choices"][0]["logprobs"]["tokens"]) == 2
    assert sent(url, b'"prompt":[5,6,7],"echo":true').json()["choices"][0]["text"].startswith("w")
    on.set()
    asking.join()


@pytest.mark.parametrize("kind", ["completion", "chat", "tools"])
def test_no_more_of_a_text_is_tokenized_than_the_context_could_hold(served, monkeypatch, kind):
    url, app = served
    preparer, seen = app.state.service.preparer, []
    tokenizer = preparer.tokenizer
    call = type(tokenizer).__call__

    def counting(self, text, *given, **how):
        seen.append(len(text))
        return call(self, text, *given, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    text = b"w1 w2 w3 " * 200_000
    tool = b'{"type":"function","function":{"name":"f","description":"%b"}}' % text
    reply = {
        "completion": lambda: sent(url, b'"prompt":["w1","%b"]' % text),
        "chat": lambda: sent(url, b'"messages":[{"role":"user","content":"%b"}]' % text, "/v1/chat/completions"),
        "tools": lambda: sent(url, b'"messages":[%b],"tools":[%b]' % (SAID, tool), "/v1/chat/completions"),
    }[kind]()
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert sum(seen) < 40_000


@pytest.mark.parametrize("part", [b" ", b"x", "é😀".encode(), b'\\"'])
def test_words_without_an_end_are_not_tokenized(served, monkeypatch, part):
    """They have few tokens, and take as much as many."""
    url, app = served
    monkeypatch.setattr(app.state.service.preparer, "tokenizer", None)
    reply = sent(url, b'"prompt":"%b"' % (part * 20_000))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.fixture
def locked(monkeypatch):
    """The port of a server with a key, impatient with bodies that stop."""
    monkeypatch.setattr(guards, "_PAUSE", 0.05)
    options = ServerOptions(keys=Keys(["a-key"]), limits=ServerLimits(seconds=0.2), store_memory="0")
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        yield int(url.rpartition(":")[2])


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
KEYED = f"{HEAD}Authorization: Bearer a-key\r\n"


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        # A key that is missing is told before any of the body has come, and in time with it.
        (f"{HEAD}Content-Length: 9000000\r\n\r\n", b"", 401),
        (f"{HEAD}Content-Length: 5\r\n\r\n", b"{   }", 401),
        (f"{HEAD}Content-Length: 500\r\nExpect: 100-continue\r\n\r\n", b"", 401),
        (f"{KEYED}Content-Length: 9000000\r\n\r\n", b"", 413),
        (f"{KEYED}Content-Length: 500\r\n\r\n", b"", 408),
        (f"{KEYED}Transfer-Encoding: chunked\r\n\r\n", b"", 408),
        # Uploads that stop in their middle are ended, whether their key is right or not.
        (f"{HEAD}Content-Length: 8000000\r\n\r\n", b" " * 500_000, None),
        (f"{KEYED}Content-Length: 8000000\r\n\r\n", b" " * 500_000, None),
        (f"{KEYED}Transfer-Encoding: chunked\r\n\r\n", b"186a0\r\n" + b" " * 100_000, None),
    ],
)
def test_uploads_end_in_time_and_need_a_key_first(locked, head, body, status):
    with socket.create_connection(("127.0.0.1", locked), timeout=60) as link:
        link.sendall(head.encode() + body)
        try:
            got = link.recv(100)
        except ConnectionResetError:
            got = b""
        assert got.startswith(b"HTTP/1.1 %d" % status) if status else got == b"", got


def test_bodies_share_a_bound(monkeypatch):
    """One that would be more than all may hold is refused, and takes its bytes with it."""
    options = ServerOptions(limits=ServerLimits(seconds=60, body_bytes=200_000, uploads=1), store_memory="0")
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as link:
            link.sendall(f"{HEAD}Content-Length: 190000\r\n\r\n".encode() + b" " * 150_000)
            full = threading.Event()

            def ask():
                while sent(url, b'"prompt":"%b"' % (b" " * 100_000)).status_code != 503:
                    pass
                full.set()

            asking = threading.Thread(target=ask)
            asking.start()
            assert full.wait(60)
            asking.join()
        while sent(url, b'"prompt":"w1%b"' % (b" " * 100_000)).status_code == 503:
            pass


def test_lists_in_the_schema_end_at_their_first_fault():
    """So that a body of many faults makes no list of them."""
    from pydantic import ValidationError

    for more in ({"prompt": [None] * 50}, {"prompt": "w1", "stop": [None] * 50}, {"prompt": [[None] * 50] * 50}):
        with pytest.raises(ValidationError) as failed:
            CompletionRequest.model_validate({"model": "tiny", **more})
        assert failed.value.error_count() < 8
