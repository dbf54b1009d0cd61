"""Prompts whose beginning is read first: as one reading under every method, or refused where too little is left."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.compat import CACHE
from small import plan_of, stored
from tiny import greedy, tiny_model, tiny_prompt

N, LEFT = 90, 40
GREEDY = greedy(max_new_tokens=4)
PLANS = {
    **{name: {} for name in kvsieve.list_methods()},
    "snapkv, rest": {"rest": "2bit"},
    "pyramidinfer, long tail": {"recent": 0.3},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(filled=True)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, N, seed=2, low=3, high=100)


def keeps_to_chunks(plan):
    """What becomes of a prompt depends on where its parts end."""
    chunks = plan.evict is not None and plan.evict.when.chunks
    return chunks or plan.prefill is not None or (plan.codec is not None and plan.evict is None)


@pytest.mark.parametrize("name", PLANS)
def test_a_begun_prompt_is_one_prompt_or_refused(model, ids, name):
    plan = plan_of(name.partition(",")[0], model, **PLANS[name])
    with kvsieve.attach(model, plan) as sieve:
        if plan.shortens_prompt:
            with pytest.raises(PlanError, match="must have whole"):
                sieve.begin(ids)
            return
        wanted = sieve.generate(ids, **GREEDY)
        for left in (LEFT, 2):
            needed = plan.queries(N)
            cache = sieve.begin(ids[:, : N - left])
            if left >= needed:
                found = sieve.generate(ids, cache=cache, **GREEDY)
                if not keeps_to_chunks(plan):
                    assert torch.equal(found.sequences, wanted.sequences)
                    assert stored(found.cache) == stored(wanted.cache)
                continue
            for act in (sieve.generate, sieve.prefill):
                with pytest.raises(InputError, match=f"looks back on the last {needed}"):
                    act(ids, cache=cache)
            with pytest.raises(InputError, match=f"looks back on the last {needed}"):
                model(ids[:, -left:], **{CACHE: cache})
            # Nothing was fed: with more tokens behind these the prompt can be completed.
            longer = torch.cat([ids, ids.flip(1)], 1)
            one = sieve.generate(longer, **GREEDY)
            assert torch.equal(sieve.generate(longer, cache=cache, **GREEDY).sequences, one.sequences)


@pytest.mark.parametrize("given", [{"reduce": False}, {"budget": 200}])
def test_where_nothing_is_dropped_little_may_be_left(model, ids, given):
    given = dict(given)
    plan = kvsieve.plan("snapkv", budget=given.pop("budget", 40), window=16)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.begin(ids[:, : N - 2])
        found = sieve.generate(ids, cache=cache, **given, **GREEDY)
        assert torch.equal(found.sequences, sieve.generate(ids, **given, **GREEDY).sequences)


def test_a_second_turn_that_is_begun(model, ids):
    more = torch.cat([ids, ids.flip(1)[:, :20]], 1)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=8)) as sieve:
        wanted = sieve.generate(more, cache=sieve.prefill(ids), **GREEDY)
        cache = sieve.begin(more[:, : N + 12], cache=sieve.prefill(ids))
        assert torch.equal(sieve.generate(more, cache=cache, **GREEDY).sequences, wanted.sequences)
        cache = sieve.begin(more[:, : N + 13], cache=sieve.prefill(ids))
        with pytest.raises(InputError, match="7 of this prompt's 20 tokens are left to read, and snapkv looks back on"):
            sieve.prefill(more, cache=cache)
