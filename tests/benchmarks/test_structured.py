"""benchmarks/speed/json_schemas.py: schemas with values that match, by jsonschema and by the grammar."""

from __future__ import annotations

import json

from benchmarks.speed.json_schemas import samples
from benchmarks.speed.structured import fault
from kvsieve.hf.generate.grammar import compiled
from kvsieve.planning.grammars import Grammar
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
