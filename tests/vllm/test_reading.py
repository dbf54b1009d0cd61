"""Contract of sparse reading: all pages read is dense attention, whatever shares a step; fewer are fewer."""

from __future__ import annotations

import pytest

from engines_of_vllm import answers, assert_alike, differ, metric, prompts_of

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

LENGTHS = [40, 300, 129, 512, 7]
PLANS = ["quest:budget=96:page=32", "quest:budget=96:page=8:means=true"]


@pytest.fixture
def sparse_rows(monkeypatch):
    """Count the rows that were read sparsely."""
    from kvsieve_vllm.cpu_backend import SieveCPUAttention

    rows, read = [], SieveCPUAttention._read_sparsely

    def counted(self, layer, query, kv_cache, output, sparse):
        rows.append(len(sparse.counts))
        return read(self, layer, query, kv_cache, output, sparse)

    monkeypatch.setattr(SieveCPUAttention, "_read_sparsely", counted)
    return rows


def test_without_a_plan_vllm_is_as_it_was(engine):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    with engine(None) as llm:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        layers = runner.compilation_config.static_forward_context.values()
        assert [type(layer.impl) for layer in layers] == [CPUAttentionBackendImpl] * 3


@pytest.mark.parametrize("plan", ["quest:budget=64:page=32", "quest:budget=64:page=8:means=true", "hsa:budget=128"])
@pytest.mark.parametrize("batched", [64, 1024])
def test_all_pages_read_is_dense_attention(engine, sparse_rows, plan, batched):
    prompts = prompts_of(LENGTHS)
    with engine(None, max_num_batched_tokens=batched) as llm:
        dense = answers(llm, prompts)
    assert not sparse_rows
    with engine(plan, self_test=True, max_num_batched_tokens=batched) as llm:
        assert_alike(answers(llm, prompts), dense)
    # Every token but the first of each answer, in every layer.
    assert sum(sparse_rows) == 3 * len(prompts) * 23


@pytest.mark.slow
def test_a_budget_reads_fewer_pages_of_long_requests_only(engine, sparse_rows):
    prompts = prompts_of([600, 40])
    with engine(None) as llm:
        dense = answers(llm, prompts)
    with engine("quest:budget=64:page=32:skip_layers=1") as llm:
        sparse = answers(llm, prompts)
    assert sum(sparse_rows) == 2 * 2 * 23
    assert differ(sparse[:1], dense[:1])
    assert_alike(sparse[1:], dense[1:])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_known_of_pages_stays_with_cached_prefixes(engine, plan):
    (prompt,) = prompts_of([400])
    other = [*prompt[:320], *prompts_of([50], seed=1)[0]]
    with engine(plan, enable_prefix_caching=True) as llm:
        first = [answers(llm, [each])[0] for each in (prompt, other)]
        again = [answers(llm, [each])[0] for each in (prompt, other)]
        assert metric(llm, "prefix_cache_hits") >= 320
    assert_alike(again, first)
    with engine(plan, enable_prefix_caching=False) as llm:
        assert_alike([answers(llm, [each])[0] for each in (prompt, other)], first)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_preemption_changes_nothing(engine, plan):
    prompts = prompts_of([200, 180, 220, 190, 210, 170], seed=3)
    with engine(plan, enable_prefix_caching=False) as llm:
        free = answers(llm, prompts, 60)
    with engine(plan, enable_prefix_caching=False, num_gpu_blocks_override=34) as llm:
        tight = answers(llm, prompts, 60)
        assert metric(llm, "num_preemptions") > 0
    assert [each.tokens for each in tight] == [each.tokens for each in free]


def test_a_plan_that_is_not_carried_stops_the_start(engine):
    from kvsieve.errors import PlanError

    with pytest.raises((PlanError, ValueError), match="token propagation"), engine("fastkv"):
        pass
