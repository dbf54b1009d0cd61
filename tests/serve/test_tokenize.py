"""/tokenize counts as completions do, and streams of chats report how far the prefill is."""

from __future__ import annotations

import json

import httpx
import pytest

from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer

HEADERS = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def url():
    options = ServerOptions(keys=Keys(["key"]), limits=ServerLimits(chunk=16, max_tokens=32))
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as address:
        yield address


def post(url, path, **body):
    return httpx.post(f"{url}{path}", json={"model": "tiny", **body}, headers=HEADERS, timeout=120)


def test_tokens_are_those_of_a_completion(url):
    reply = post(url, "/tokenize", prompt="w1 w2 [EOS] w7").json()
    used = post(url, "/v1/completions", prompt="w1 w2 [EOS] w7", max_tokens=1).json()["usage"]
    assert reply["count"] == used["prompt_tokens"] == len(reply["tokens"]) == 4 and reply["max_model_len"] > 0
    assert reply["tokens"] == [4, 5, 127, 10]
    assert post(url, "/tokenize", prompt="w1 w2", add_special_tokens=False).json()["tokens"] == [4, 5]
    counted = post(url, "/tokenize", prompt="w1 " * 50, count_only=True).json()
    assert (counted["count"], counted["tokens"]) == (50, None)
    assert post(url, "/tokenize", prompt="").json()["count"] == 0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "w1", "model": "other"}, 404, "model"),
        ({}, 400, "prompt"),
        ({"prompt": ["w1"]}, 400, "prompt"),
        ({"prompt": "w1", "messages": []}, 400, "messages"),
        ({"prompt": "x" * 1_000_000}, 400, None),
    ],
)
def test_what_cannot_be_counted_is_refused(url, body, status, param):
    reply = post(url, "/tokenize", **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_counting_needs_a_key(url):
    assert httpx.post(f"{url}/tokenize", json={"model": "tiny", "prompt": "w1"}).status_code == 401


def chunks(url, **more):
    messages = [{"role": "user", "content": "w1 w2 w3 w4 " * 20}]
    reply = post(url, "/v1/chat/completions", messages=messages, max_tokens=3, stream=True, **more)
    return [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]


def test_a_stream_reports_the_prefill(url):
    found = chunks(url, return_progress=True, stream_options={"include_usage": True})
    told = [each["prompt_progress"] for each in found if "prompt_progress" in each]
    total = found[-1]["usage"]["prompt_tokens"]
    done = [each["processed"] for each in told]
    assert done[0] == 0 and len(done) > 2 and done == sorted(done) and done[-1] <= total
    assert {each["total"] for each in told} == {total} and {each["cache"] for each in told} == {0}
    assert all(each["time_ms"] >= 0 for each in told)
    last = max(at for at, each in enumerate(found) if "prompt_progress" in each)
    first = min(at for at, each in enumerate(found) if each["choices"] and each["choices"][0]["delta"].get("content"))
    assert last < first
    again = [each["prompt_progress"] for each in chunks(url, return_progress=True) if "prompt_progress" in each]
    assert again[0]["cache"] == again[0]["processed"] > 0
    assert not any("prompt_progress" in each for each in chunks(url))


def test_progress_needs_a_stream(url):
    body = {"messages": [{"role": "user", "content": "w1"}], "return_progress": True}
    reply = post(url, "/v1/chat/completions", **body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "return_progress"
