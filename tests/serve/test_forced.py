"""Forced calls by schemas as applications write them: arguments match them in every form of calls."""

from __future__ import annotations

import functools
import json
import random

import jsonschema
import pytest

from kvsieve.planning.grammars import Grammar
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.parsers.gemma import FUNCTION_GEMMA, GEMMA_4
from kvsieve.serve.parsers.objects import MarkedCalls
from kvsieve.serve.parsers.tagged import GLM, QWEN_CODER, TaggedCalls, schemas_of
from kvsieve.serve.pieces import WholeAnswer
from toy_bytes import byte_level

pytest.importorskip("llguidance")
from kvsieve.hf.generate.grammar import compiled

FORMS = {
    "hermes": lambda tools: MarkedCalls(),
    "qwen coder": lambda tools: TaggedCalls(QWEN_CODER, schemas_of(tools)),
    "glm": lambda tools: TaggedCalls(GLM, schemas_of(tools)),
    "gemma 4": lambda tools: GEMMA_4,
    "function gemma": lambda tools: FUNCTION_GEMMA,
}
NUMBER = {"type": "integer"}
STRING = {"type": "string"}
ITEM = {"type": "object", "properties": {"id": NUMBER, "tag": STRING}, "required": ["id", "tag"]}
NOTHING = {"type": "null"}
VALUES = {
    "maybe a string": {"anyOf": [STRING, NOTHING]},
    "types": {"type": ["string", "null"]},
    "maybe a list": {"anyOf": [{"type": "array", "items": NUMBER}, NOTHING]},
    "a definition": {"$ref": "#/$defs/Item"},
    "maybe a definition": {"anyOf": [{"$ref": "#/$defs/Item"}, NOTHING]},
    "definitions": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "maxItems": 2},
    "a map": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}, "maxProperties": 2},
    "a pattern": {"type": "string", "pattern": "^[a-c]{2}/[0-9]$"},
    "a pattern within": {"type": "string", "pattern": "[0-9]", "maxLength": 6},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "a long string": {"type": "string", "maxLength": 20_000},
    "constants": {"anyOf": [{"const": "a"}, {"const": "b"}]},
    "any constant": {"enum": ["a", 5, None]},
    "bounds": {"type": "number", "exclusiveMinimum": 3, "maximum": 7},
    "objects": {"oneOf": [ITEM, {"type": "boolean"}]},
}


@functools.cache
def tokens_of(controls):
    """A tokenizer of bytes and control tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"eos_token": "<|eos|>"})
    tokenizer.add_tokens(list(controls), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", FORMS)
def test_arguments_match_their_schema(name, value):
    schema = {"type": "object", "properties": {"a": VALUES[value]}, "required": ["a"], "$defs": {"Item": ITEM}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    form = FORMS[name](tools)
    tokenizer = tokens_of(form.controls)
    added = {word.content: number for number, word in tokenizer.added_tokens_decoder.items()}
    grammar = compiled(Grammar.lark(AnswerForm(form, named=True).forced_calls(added, tools)), tokenizer)
    closing = [tokenizer(mark)["input_ids"] for mark in ('"', "\n</parameter>", *form.controls)]
    end = tokenizer.eos_token_id
    draw = random.Random(3)
    for _ in range(2):
        matcher = grammar.matcher([end])
        tokens: list[int] = []
        while not matcher.complete and len(tokens) < 600:
            fits = [mark for mark in closing if matcher.allowed(mark) == len(mark)]
            if fits and draw.random() < 0.5:
                some = draw.choice(fits)
                assert all(matcher.take(token) for token in some)
                tokens += some
            else:
                order = draw.sample(range(len(tokenizer)), len(tokenizer))
                tokens.append(next(token for token in order if matcher.take(token)))
        answer = tokenizer.decode([token for token in tokens if token != end])
        (call,) = WholeAnswer(form.parser().add(answer, last=True)).calls
        jsonschema.validate(json.loads(call.arguments), schema)


def test_a_tag_without_its_line_break_ends_a_string():
    """A parser ends the value there."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": STRING}}}}]
    form = TaggedCalls(QWEN_CODER, schemas_of(tools))
    tokenizer = tokens_of(())
    matcher = compiled(Grammar.lark(AnswerForm(form).forced_calls({}, tools)), tokenizer).matcher([0])
    answer = "<tool_call>\n<function=add>\n<parameter=a>\nx</parameter>"
    assert all(matcher.take(token) for token in tokenizer(answer)["input_ids"])
    assert matcher.allowed(tokenizer("y")["input_ids"]) == 0 < matcher.allowed(tokenizer("\n</function>")["input_ids"])
