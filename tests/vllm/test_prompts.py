"""Contract of prompts that kvsieve's own attention reads: answers are those of vLLM's.

It is a kernel for bfloat16; here torch's operations in float32 stand for it, so that answers can be compared token for
token.
"""

from __future__ import annotations

import pytest

from engines_of_vllm import answers, assert_alike, metric, prompts_of, stepped

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

EVICT = "snapkv:budget=96:window=16:kernel=7"


@pytest.fixture
def ours(monkeypatch):
    """Let chunks of 24 tokens and more go to kvsieve's attention; lists [new tokens, entries] of each call."""
    from kvsieve_vllm import attention, cpu_backend

    calls, attend = [], attention.attend

    def counted(request):
        calls.append((request.asked.query.shape[2], request.stored.keys.shape[2]))
        return attend(request)

    monkeypatch.setattr(attention, "attend", counted)
    monkeypatch.setattr(cpu_backend, "LONG", 24)
    monkeypatch.setattr(cpu_backend, "has_kernel", lambda dtype, dim: True)
    return calls


@pytest.mark.parametrize("plan", ["snapkv:budget=10%", "quest:budget=256"])
def test_whole_prompts_and_chunks_are_read_as_vllm_reads_them(engine, ours, plan):
    prompts = prompts_of([40, 300, 129, 512, 7, 31])
    with engine(None, max_num_batched_tokens=90) as llm:
        dense = answers(llm, prompts)
        assert not ours
    with engine(plan, self_test=True, max_num_batched_tokens=90) as llm:
        assert_alike(answers(llm, prompts), dense)
    assert any(new == stored for new, stored in ours) and any(new < stored for new, stored in ours)


def test_what_is_evicted_and_read_again_after_preemptions_is_the_same(engine, ours, monkeypatch):
    """Answers that are read again have an eviction before them, and are long enough here, too."""
    from kvsieve_vllm import cpu_backend

    prompts = prompts_of([300, 140, 257], seed=7)
    with engine(EVICT, enable_prefix_caching=False, max_num_batched_tokens=90) as llm:
        got, preempted = stepped(llm, prompts, 60, every=5)
        assert metric(llm, "kvsieve_blocks_freed") > 0
    assert preempted >= 10 and any(new < stored < 150 for new, stored in ours)
    monkeypatch.setattr(cpu_backend, "has_kernel", lambda dtype, dim: False)
    ours.clear()
    with engine(EVICT, enable_prefix_caching=False) as llm:
        assert got == [each.tokens for each in answers(llm, prompts, 60)]
    assert not ours
