"""Slices of tests/support/fuzz.py and fuzz_store.py, and that they would tell a defect."""

from __future__ import annotations

import random
import time

import pytest

import fuzz
import fuzz_store
import kvsieve
from kvsieve.errors import PlanError
from kvsieve.store import rules


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return fuzz.World.made(tmp_path_factory.mktemp("fuzz"))


def test_bad_parameters_and_inputs_are_refused_or_run(world):
    counts, failures = fuzz.fuzz(world, 42, 21, seed=13, limit=120)
    assert not failures, "\n".join(failures)
    assert counts["refused"] > 25 and counts["ran"] > 3 and sum(counts.values()) == 63


def test_a_number_stands_for_one_case():
    made = [fuzz.parameter_case(random.Random("0/7"), 7)[0] for _ in range(2)]
    assert made[0] == made[1]


def fail(error):
    def case(world):
        raise error

    return case


def test_defects_are_told_apart(world):
    assert fuzz.judged(fail(PlanError("no")), world, 60) == ("refused", "no")
    outcome, words = fuzz.judged(fail(TypeError("foreign words")), world, 60)
    assert outcome == "foreign" and "TypeError: foreign words (test_fuzz.py" in words
    assert fuzz.judged(lambda world: time.sleep(60), world, 0.05)[0] == "hang"
    left = kvsieve.attach(world.model, kvsieve.plan("full"))
    assert fuzz.judged(lambda world: left.__enter__(), world, 60)[0] == "left behind"
    left.__exit__(None, None, None)
    assert fuzz.judged(lambda world: None, world, 60) == ("ran", "")


def test_traces_through_a_store(monkeypatch):
    """Answers are those without it; and were answers taken for prompts, some would not be."""
    counts, different = fuzz_store.fuzz((1, 6, 7), 0)
    assert not different and counts["answers"] > 8 and counts["found"] > 3
    monkeypatch.setattr(rules, "tells_answers_apart", lambda plan: False)
    assert len(fuzz_store.fuzz((1, 6), 0)[1]) >= 2
