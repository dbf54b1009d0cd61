"""Contract of methods that other packages bring: vLLM runs those whose traits fit."""

from __future__ import annotations

import pytest

from engines_of_vllm import answers, answers_on_transformers, differ, metric, prompts_of
from other_packages import OWN, look_for_methods

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    look_for_methods(monkeypatch, OWN)


def test_an_evictor_keeps_what_it_keeps_on_transformers(engine, checkpoint):
    plan, prompts = "own-evictor:budget=96", prompts_of([256, 320])
    expected = answers_on_transformers(checkpoint, plan, prompts, 24, [96] * 3)
    with engine(plan) as llm:
        assert [each.tokens for each in answers(llm, prompts, 24)] == expected
        assert metric(llm, "kvsieve_blocks_freed") > 0


@pytest.mark.slow
def test_a_reader_reads_fewer_pages_of_long_requests(engine):
    prompts = prompts_of([600, 40])
    with engine(None) as llm:
        dense = answers(llm, prompts)
    with engine("own-reader") as llm:
        sparse = answers(llm, prompts)
    assert differ(sparse[:1], dense[:1]) and not differ(sparse[1:], dense[1:])
