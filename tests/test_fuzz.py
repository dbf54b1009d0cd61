"""Slices of benchmarks/fuzz.py and fuzz_store.py, and that they would tell a defect."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

import kvsieve
from kvsieve.errors import PlanError

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_fuzz", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def world(script, tmp_path_factory):
    return script.World.made(tmp_path_factory.mktemp("fuzz"))


def test_bad_parameters_and_inputs_are_refused_or_run(script, world):
    counts, failures = script.fuzz(world, 42, 21, seed=13, limit=120)
    assert not failures, "\n".join(failures)
    assert counts["refused"] > 25 and counts["ran"] > 3 and sum(counts.values()) == 63


def test_a_number_stands_for_one_case(script):
    import random

    made = [script.parameter_case(random.Random("0/7"), 7)[0] for _ in range(2)]
    assert made[0] == made[1]


def fail(error):
    def case(world):
        raise error

    return case


def test_defects_are_told_apart(script, world):
    assert script.judged(fail(PlanError("no")), world, 60) == ("refused", "no")
    outcome, words = script.judged(fail(TypeError("foreign words")), world, 60)
    assert outcome == "foreign" and "TypeError: foreign words (test_fuzz.py" in words
    assert script.judged(lambda world: time.sleep(60), world, 0.05)[0] == "hang"
    left = kvsieve.attach(world.model, kvsieve.plan("full"))
    assert script.judged(lambda world: left.__enter__(), world, 60)[0] == "left behind"
    left.__exit__(None, None, None)
    assert script.judged(lambda world: None, world, 60) == ("ran", "")


@pytest.fixture
def traces(monkeypatch):
    """benchmarks/fuzz_store.py, with the rule of reuse."""
    from kvsieve.store import rules

    spec = importlib.util.spec_from_file_location("benchmarks_fuzz_store", SCRIPT.with_name("fuzz_store.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module.fuzz, rules


def test_traces_through_a_store(traces, monkeypatch):
    """Answers are those without it; and were answers taken for prompts, some would not be."""
    fuzz, rules = traces
    counts, different = fuzz((1, 6, 7), 0)
    assert not different and counts["answers"] > 8 and counts["found"] > 3
    monkeypatch.setattr(rules, "tells_answers_apart", lambda plan: False)
    assert len(fuzz((1, 6), 0)[1]) >= 2
