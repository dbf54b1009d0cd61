"""Budgets of answers: `answer=`, which keeps the prompt's entries, and `grows=`, a share of all tokens."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import CriticalKV, DuoAttention, SnapKV
from kvsieve.planning.budget import Budget
from small import stored
from tiny import tiny_prompt

NEW = 61
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PLANS = {
    "knorm": {"every": 4},
    "snapkv": {"every": 3, "window": 5, "kernel": 3},
    "h2o": {},
    "tova": {},
    "streamingllm": {"every": 1, "sinks": 2},
    "sagekv": {"every": 2, "sinks": 2},
    "random": {"every": 5, "recent": 4},
    "morphkv": {"window": 4},
    "roco": {"newest": 2, "sinks": 1},
    "vase": {"window": 4, "large": 2, "every": 4},
}


def generate(sieve, ids, mask=None, new=NEW, **options):
    return sieve.generate(ids, mask, max_new_tokens=new, min_new_tokens=new, **GREEDY, **options)


@pytest.mark.parametrize("name", PLANS)
def test_the_prompt_stays_and_the_answer_has_a_budget_of_its_own(model, name):
    ids = tiny_prompt(1, 40, seed=5)
    with kvsieve.attach(model, kvsieve.plan(name, budget=20, answer=8, **PLANS[name])) as sieve:
        prompt = stored(sieve.prefill(ids))[0]
        found = stored(generate(sieve, ids).cache)[0]
        whole = stored(generate(sieve, ids, chunk=16).cache)[0]
    # 60 generated tokens are stored, a multiple of every `every`.
    for layer, (before, after) in enumerate(zip(prompt, found, strict=True)):
        for own, now in zip(before, after, strict=True):
            assert [token for token in now if token < 40] == own and len(own) == 20, (name, layer)
            assert len([token for token in now if token >= 40]) == 8, (name, layer)
    assert whole == found


def test_the_best_of_the_answer_stay(model):
    """First layer only: its keys do not depend on evictions."""
    ids = tiny_prompt(1, 40, seed=5)
    with kvsieve.attach(model, kvsieve.plan("knorm", budget="100%", answer=8, every=4)) as sieve:
        result = generate(sieve, ids)
        first = stored(result.cache)[0][0]
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        keys = sieve.prefill(result.sequences[:, :-1]).sieve_layers[0].store.keys[0]
    for head, kept in enumerate(first):
        norms = keys[head].norm(dim=-1).tolist()
        best = sorted(range(40, 100), key=lambda token: norms[token])[:8]
        assert kept == [*range(40), *sorted(best)]


@pytest.mark.parametrize("name", PLANS)
def test_a_padded_row_answers_as_alone(model, name):
    ids = tiny_prompt(2, 40, seed=5)
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    with kvsieve.attach(model, kvsieve.plan(name, budget="50%", floor=0, answer=8, **PLANS[name])) as sieve:
        together = generate(sieve, ids, mask, 31)
        alone = generate(sieve, ids[1:, 9:], None, 31)
        assert torch.equal(together.sequences[1, 40:], alone.sequences[0, 31:])
        assert stored(together.cache, [0, 9])[1] == stored(alone.cache)[0]


def test_earlier_answers_are_part_of_the_next_prompt(model):
    ids, more = tiny_prompt(1, 40, seed=5), tiny_prompt(1, 10, seed=6)
    with kvsieve.attach(model, kvsieve.plan("knorm", budget=20, answer=8, every=4)) as sieve:
        result = generate(sieve, ids)
        assert set(result.cache.entries()) == {28}
        ids = torch.cat([result.sequences, more], 1)
        prompt = sieve.prefill(ids, cache=result.cache.fork())
        assert set(prompt.entries()) == {20}
        again = generate(sieve, ids, cache=result.cache)
        before, after = stored(prompt)[0], stored(again.cache)[0]
    size = ids.shape[1]
    assert [[[token for token in head if token < size] for head in layer] for layer in after] == before
    assert set(again.cache.entries()) == {28}


@pytest.mark.parametrize("options", [{"answer": 8}, {"answer": "25%"}, {"grows": True, "budget": "50%"}])
def test_drafts_change_nothing(model, options):
    ids = tiny_prompt(1, 8, seed=5).repeat(1, 4)
    plan = kvsieve.plan("snapkv", **{"budget": 20, **options}, floor=0, every=3, window=5, kernel=3)
    with kvsieve.attach(model, plan) as sieve:
        plain = generate(sieve, ids, None, 40)
        drafted = generate(sieve, ids, None, 40, draft="lookup:tokens=4:ngram=1:adapt=false")
    assert torch.equal(plain.sequences, drafted.sequences)
    assert stored(plain.cache) == stored(drafted.cache)


def test_shares(model):
    ids = tiny_prompt(1, 40, seed=5)
    sizes = {}
    for text in (
        "knorm:budget=20:every=4:answer=25%:floor=0",
        "knorm:budget=50%:every=4:grows=true:floor=0",
        "knorm:budget=50%:every=4:floor=0",
        "knorm:budget=48:every=4:answer=remaining",
        "knorm:budget=60%:every=4:answer=remaining:grows=true:floor=0",
    ):
        with kvsieve.attach(model, kvsieve.plan(text)) as sieve:
            (sizes[text],) = set(generate(sieve, ids).cache.entries())
    # 60 tokens of the answer are stored, 100 in all; the last plan cuts the prompt to 24 entries.
    assert list(sizes.values()) == [20 + 15, 50, 20, 48, 60]


def test_a_share_of_an_answer_has_the_floor_of_names():
    plan = kvsieve.plan("snapkv", answer="25%", every=64, floor=512)
    assert plan.evict.answer == Budget(ratio=0.25, floor=512) and plan.evict.answer_entries(600, 100, 0) == 512
    assert kvsieve.plan("snapkv:answer=25%:every=64:floor=0").evict.answer == Budget(ratio=0.25)
    assert kvsieve.plan("snapkv:answer=64:every=64").evict.answer == Budget(tokens=64)
    assert kvsieve.plan("fastkv:answer=64:every=64").evict.answer == Budget(tokens=64)


@pytest.mark.parametrize("text", ["knorm:every=4:answer=8", "scope:answer=30%:recent=4", "random:grows=true"])
def test_plans_are_written_and_read(text):
    plan = kvsieve.plan(text)
    assert kvsieve.Plan.from_dict(plan.to_dict()).evict == plan.evict


def test_engines_that_go_by_lengths_are_told():
    assert SnapKV(budget=0.2, every=8).traits.fixed_counts
    assert not SnapKV(budget=0.2, every=8, answer=64).traits.fixed_counts
    assert not SnapKV(budget=0.2, every=8, grows=True).traits.fixed_counts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": 64}, "give every= as well"),
        ({"grows": True}, "give every= as well"),
        ({"answer": 64, "every": 8, "grows": True}, "leave grows= out"),
        ({"budget": 64, "every": 8, "grows": True}, "about a share of all tokens, and the budget is 64"),
        ({"answer": "remaining", "every": 8}, "give a number of entries as budget=, or grows=True"),
        ({"answer": "64MiB", "every": 8}, "answer cannot be given in bytes"),
        ({"answer": 20, "every": 8}, "a answer of 20 entries is too small|answer of 20 entries is too small"),
        ({"answer": "much", "every": 8}, "neither a share"),
        ({"answer": 64, "every": 8, "grows": 1}, "grows must be True or False"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(PlanError, match=message):
        kvsieve.plan("snapkv", **options)


def test_who_divides_budgets_refuses_them():
    base = SnapKV(budget=0.2, every=8, answer=64)
    with pytest.raises(PlanError, match="CriticalKV: answer= is for evictors that rank entries themselves"):
        CriticalKV(base=base)
    with pytest.raises(PlanError, match="DuoAttention: grows="):
        DuoAttention(budget=0.5, heads=((1.0,),), every=8, grows=True)
    with pytest.raises(PlanError, match="answer"):
        kvsieve.plan("adakv", answer=64, every=8)
