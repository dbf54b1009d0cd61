"""Contract of tensor parallelism: each process reads and keeps entries of its own heads, with the same answers."""

from __future__ import annotations

import pytest

from engines_of_vllm import answers, assert_alike, prompts_of

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")


@pytest.mark.slow
def test_two_processes_answer_as_one(engine):
    prompts, plan = prompts_of([300, 40, 517], seed=4), "rocketkv:budget=128:window=16"
    options = {"max_num_batched_tokens": 200}
    with engine(plan, **options) as llm:
        alone = answers(llm, prompts, 60)
    with engine(plan, tensor_parallel_size=2, distributed_executor_backend="mp", **options) as llm:
        assert_alike(answers(llm, prompts, 60), alone)
