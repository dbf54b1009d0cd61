"""Contract of eviction: what is packed is attended to as before, evictors choose it as everywhere, blocks go back."""

from __future__ import annotations

import pytest

from engines_of_vllm import (
    BLOCK,
    Answer,
    answers,
    answers_on_transformers,
    assert_alike,
    differ,
    free_blocks,
    metric,
    prompts_of,
    stepped,
)

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

PLANS = [
    "snapkv:budget=96:window=16:kernel=7",
    "lagkv:budget=96:decode=false:lag=32:sinks=4",
    "keydiff:budget=96",
    "knorm:budget=96",
    "streamingllm:budget=96",
    "rocketkv:budget=128:window=16",
]
# The same again while decoding; the second looks at queries from before the last time.
REPEATED = [
    "lagkv:budget=96:lag=32:sinks=32",
    "snapkv:budget=96:window=48:kernel=7:every=32",
    "keydiff:budget=96:every=32",
]


@pytest.mark.parametrize("batched", [64, 1024])
def test_everything_packed_in_reverse_is_dense_attention(engine, batched):
    prompts = prompts_of([40, 300, 129, 512, 7, 31])
    with engine(None, max_num_batched_tokens=batched) as llm:
        dense = answers(llm, prompts)
    with engine("snapkv:budget=10%", self_test=True, max_num_batched_tokens=batched) as llm:
        assert_alike(answers(llm, prompts), dense)


@pytest.mark.parametrize("plan", PLANS[:5])
def test_entries_are_those_that_kvsieve_keeps_on_transformers(engine, checkpoint, plan):
    same_on_transformers(engine, checkpoint, plan, 24)


@pytest.mark.parametrize("plan", REPEATED)
def test_entries_are_those_that_kvsieve_keeps_while_decoding(engine, checkpoint, plan):
    same_on_transformers(engine, checkpoint, plan, 80)


def same_on_transformers(engine, checkpoint, plan: str, tokens: int) -> None:
    prompts = prompts_of([256, 320])
    expected = answers_on_transformers(checkpoint, plan, prompts, tokens, [96] * 3)
    with engine(plan) as llm:
        assert [each.tokens for each in answers(llm, prompts, tokens)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, *REPEATED, "streamingllm:budget=96:every=24"])
def test_blocks_go_back_and_answers_are_the_same_however_prompts_are_scheduled(engine, plan):
    prompts = prompts_of([300, 45, 517, 258, 129, 384], seed=5)
    with engine(plan, max_num_seqs=1) as llm:
        alone = answers(llm, prompts, 60)
        assert metric(llm, "kvsieve_blocks_freed") > 0
        everything = free_blocks(llm)
    with engine(plan, max_num_batched_tokens=70) as llm:
        together = answers(llm, prompts, 60)
        assert free_blocks(llm) == everything
    assert [each.tokens for each in together] == [each.tokens for each in alone]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[5]])
def test_preemption_changes_nothing(engine, plan):
    """A request that comes back has its answer read again together with its prompt."""
    prompts = prompts_of([200, 180, 220, 190, 210, 170], seed=3)
    with engine(plan) as llm:
        free = answers(llm, prompts, 100)
        everything = free_blocks(llm)
    with engine(plan, num_gpu_blocks_override=26, max_model_len=800) as llm:
        tight = answers(llm, prompts, 100)
        assert metric(llm, "num_preemptions") > 0
        assert free_blocks(llm) == everything - 200 + 26
    assert [each.tokens for each in tight] == [each.tokens for each in free]


@pytest.mark.parametrize("plan", [f"{PLANS[0]}:every=12", PLANS[5], REPEATED[0], "quest:budget=96:page=32"])
def test_preemption_at_every_place(engine, plan):
    """Requests are put back by force, again and again: while their prompts are read, at their ends, and behind them."""
    prompts = prompts_of([300, 140, 257], seed=7)
    with engine(plan, enable_prefix_caching=False) as llm:
        free = answers(llm, prompts, 40)
    with engine(plan, enable_prefix_caching=False, max_num_batched_tokens=90) as llm:
        got, preempted = stepped(llm, prompts, 40, every=3)
    assert preempted >= 20
    assert got == [each.tokens for each in free]


@pytest.mark.slow
def test_an_aborted_request_leaves_nothing(engine):
    from vllm import SamplingParams

    kept, gone = prompts_of([300, 280], seed=9)
    with engine(PLANS[0], max_num_batched_tokens=100) as llm:
        (alone,) = answers(llm, [kept], 40)
        everything = free_blocks(llm)
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        for steps in (1, 3, 4, 20):
            ids = [
                llm.llm_engine.add_request(f"{name}{steps}", {"prompt_token_ids": prompt}, sampling) or f"{name}{steps}"
                for name, prompt in (("gone", gone), ("kept", kept))
            ]
            found = None
            for step in range(200):
                if step == steps:
                    llm.llm_engine.abort_request([ids[0]])
                for output in llm.llm_engine.step():
                    found = output if output.finished and output.request_id == f"kept{steps}" else found
                if not llm.llm_engine.has_unfinished_requests():
                    break
            assert tuple(found.outputs[0].token_ids) == alone.tokens, steps
            assert free_blocks(llm) == everything


def test_eviction_switches_prefix_caching_off_aloud(engine, caplog_vllm):
    (prompt,) = prompts_of([400])
    with engine(PLANS[0], enable_prefix_caching=True) as llm:
        first, second = (answers(llm, [prompt])[0] for _ in range(2))
        assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    assert_alike([second], [first])
    assert "prefix caching is switched off" in caplog_vllm.text


@pytest.mark.slow
def test_counts_are_among_vllms_metrics(engine):
    with engine("knorm:budget=96") as llm:
        answers(llm, prompts_of([320, 256, 40]))
        counted = [metric(llm, f"kvsieve_{name}") for name in ("requests", "blocks_freed", "entries_kept")]
        assert counted == [2, 320 // BLOCK + 256 // BLOCK - 2 * 3, counted[2]]
        assert 2 * 96 <= counted[2] <= 2 * (96 + BLOCK)


@pytest.mark.slow
def test_more_fit_into_a_small_pool(engine):
    """Prompts of 16 blocks, of which 3 stay, in a pool of 50: all are there at once while they answer."""
    prompts = prompts_of([512] * 6, seed=11)
    with engine(PLANS[0], num_gpu_blocks_override=50, max_model_len=800) as llm:
        answers(llm, prompts, 40)
        assert metric(llm, "num_preemptions") == 0


@pytest.mark.slow
def test_a_small_budget_changes_answers(engine):
    prompts = prompts_of([512])
    with engine(None) as llm:
        dense = answers(llm, prompts)
    with engine("streamingllm:budget=64") as llm:
        assert differ(answers(llm, prompts), dense)


def test_answers_are_compared_closely():
    one = [Answer((1, 2), (-0.1, -0.2))]
    with pytest.raises(AssertionError):
        assert_alike(one, [Answer((1, 2), (-0.1, -0.3))])
    with pytest.raises(AssertionError):
        assert_alike(one, [Answer((1, 3), (-0.1, -0.2))])
