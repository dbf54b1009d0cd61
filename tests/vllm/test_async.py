"""Contract of asynchronous scheduling: a step is scheduled before the last one is over, and answers stay as they are.

vLLM has it on GPUs, its runner the same as on CPUs; what it asks of CUDA's streams does nothing here.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from engines_of_vllm import answers, assert_alike, metric, prompts_of

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")


@pytest.fixture
def asynchronous(monkeypatch):
    """Schedule asynchronously, which vLLM switches off on CPUs."""
    from kvsieve_vllm import plugin

    configure = plugin.configure

    def configured(vllm_config) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        configure(vllm_config)

    monkeypatch.setattr(plugin, "configure", configured)
    done = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "preempted"),
    [("rocketkv:budget=128:window=16", True), ("snapkv:budget=96:window=16:kernel=7:every=12", False)],
)
def test_answers_are_those_of_steps_one_after_the_other(engine, request, plan, preempted):
    prompts = prompts_of([200, 180, 220, 190, 7, 300], seed=3)
    options = {"max_num_batched_tokens": 120}
    with engine(plan, **options) as llm:
        expected = answers(llm, prompts, 60)
    request.getfixturevalue("asynchronous")
    with engine(plan, num_gpu_blocks_override=18, max_model_len=400, **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert type(scheduler).__name__ == "AsyncScheduler"
        assert_alike(answers(llm, prompts, 60), expected)
        assert (metric(llm, "num_preemptions") > 0) == preempted and metric(llm, "kvsieve_blocks_freed") > 0
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 17
