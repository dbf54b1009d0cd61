"""Every method does on a tiny model what the committed record says; tests/support/freeze.py wrote it."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest

import freeze
import kvsieve

RECORD = Path(__file__).parent / "data" / "frozen.json.gz"


# These have tests of their own: codecs round numbers in either way, and sparse prompts are longer ones.
APART = {"codec", "rest", "prefill"}
METHODS = [name for name in kvsieve.list_methods() if not APART & {*kvsieve.method_info(name).roles}]


@pytest.fixture(scope="module")
def model():
    made = freeze.tiny_model()
    # Each answer looks for garbage in all that is not frozen; the imports of a first model are most of that.
    gc.collect()
    gc.freeze()
    return made


@pytest.fixture(scope="module")
def record():
    return freeze.read(RECORD)


@pytest.mark.parametrize("name", METHODS)
def test_behaviour_is_as_recorded(model, record, name):
    expected = record.get(name, {})
    found = freeze.frozen(model, name)
    lines = [
        f"{name}, {case}: {line}" for case in found for line in freeze.differences(expected.get(case), found[case])
    ]
    assert not lines, "\n".join(lines)


def test_the_record_is_of_these_methods_and_cases(record):
    assert sorted(record) == sorted(METHODS)
    assert all(list(cases) == list(freeze.CASES) for cases in record.values())


def test_other_tokens_logits_and_refusals_are_told(record):
    before = record["snapkv"]["two turns"]
    assert freeze.differences(before, copy.deepcopy(before)) == []
    other = copy.deepcopy(before)
    other["kept 1"][0][2][1] = "0-3"
    (line,) = freeze.differences(before, other)
    assert "kept 1: other tokens in 1 heads, first in row 0, layer 2, head 1" in line
    other = copy.deepcopy(before)
    other["logits 0"][1][0][3] += 1e-5
    assert freeze.differences(before, other) == []
    other["logits 0"][1][0][3] += 1e-2
    assert freeze.differences(before, other) == ["logits 0: differ by up to 0.01"]
    assert freeze.differences(before, {"refused": "PlanError"}) == ["was runs, is PlanError"]
    assert freeze.differences(None, before) == ["is not in the record: write it again"]
