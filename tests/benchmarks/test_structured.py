"""benchmarks/speed/structured.py, and its schemas with values that match, by jsonschema and by the grammar."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.speed import structured
from benchmarks.speed.json_schemas import samples
from benchmarks.speed.structured import fault
from kvsieve.hf.generate.grammar import compiled
from kvsieve.planning.grammars import Grammar
from tiny_models import build
from toy_bytes import byte_chats


def test_values_match_their_schemas_and_a_longer_list_begins_alike():
    tokenizer = byte_chats()
    found = samples(30)
    assert samples(5) == found[:5] and samples(5, seed=1) != found[:5]
    text = json.dumps([sample.schema for sample in found])
    for part in ("$ref", "anyOf", "enum", "format", "minimum", "maxItems", "pattern"):
        assert part in text
    for sample in found:
        value = json.dumps(sample.value)
        assert fault(value, sample.schema) is None and fault(value[:-1], sample.schema) is not None
        tokens = tokenizer(value)["input_ids"]
        assert compiled(Grammar.json_schema(sample.schema), tokenizer).matcher(()).allowed(tokens) == len(tokens)


def test_a_run_continues_where_it_stopped(tmp_path, monkeypatch):
    asked = []

    def answered(sieve, tokenizer, sample, number, arguments):
        asked.append(number)
        return {"fault": None, "ratio": 1.0, "compile_ms": 1.0, "matcher_ms": 1.0}

    monkeypatch.setattr(structured, "answered", answered)
    monkeypatch.setattr(structured.kvsieve.models, "load", lambda name: (build("llama"), byte_chats()))
    written = []

    def measure(count: int, known: dict) -> dict:
        given = argparse.Namespace(schemas=count, seed=0, new_tokens=8, minutes=None, out=tmp_path / "result.json")
        structured.measured("toy", given, known, lambda: written.append(json.dumps(known)))
        return known

    known = measure(2, {})
    assert asked == [0, 1] and known["summary"]["schemas"] == 2
    known = measure(3, json.loads(written[-1]))
    assert asked == [0, 1, 2] and len(known["environments"]) == 2
    measure(3, known)
    assert asked == [0, 1, 2]
    with pytest.raises(SystemExit, match="other settings"):
        measure(3, {**known, "settings": {"seed": 1, "new_tokens": 8}})


def test_answers_after_the_timed_ones_are_only_checked():
    row = {"fault": None, "compile_ms": 1.0, "matcher_ms": 1.0}
    found = structured.summary([{**row, "ratio": 1.5}, row, {**row, "fault": "not ended"}])
    assert (found["schemas"], found["timed"], found["ratio"]) == (3, 1, 1.5) and found["valid"] == pytest.approx(2 / 3)
    assert structured.summary([row])["ratio"] is None


@pytest.mark.parametrize("calls", [False, True])
def test_answers_of_a_server_are_checked(calls, tmp_path, monkeypatch):
    samples = structured.samples(3, 0)
    texts = {sample.topic + json.dumps(sample.schema): json.dumps(sample.value) for sample in samples}
    asked = []

    def fetched(url, body=None):
        if body is None:
            return {"data": [{"id": "toy"}]}
        asked.append(body)
        told = body["tools"][0]["function"]["parameters"] if calls else body["response_format"]["json_schema"]["schema"]
        text = next(text for key, text in texts.items() if key.endswith(json.dumps(told)))
        # The last answer is cut off.
        text = text[:-1] if len(asked) == 3 else text
        message = {"content": text}
        if calls:
            message = {"content": None, "tool_calls": [{"function": {"name": "record", "arguments": text}}]}
        return {"choices": [{"finish_reason": "stop", "message": message}], "usage": {"completion_tokens": 5}}

    monkeypatch.setattr(structured, "fetched", fetched)
    known: dict = {}
    given = {"schemas": 3, "seed": 0, "new_tokens": 8, "minutes": None, "clients": 1, "calls": calls, "server": "x"}
    structured.served(argparse.Namespace(out=tmp_path, **given), known, lambda: None)
    assert known["summary"] == {"schemas": 3, "valid": 2 / 3} and [row["tokens"] for row in known["answers"]] == [5] * 3
    assert {body["model"] for body in asked} == {"toy"}
