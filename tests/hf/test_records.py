"""What evictors record while a prompt is read goes with its entries: copies, files, snapshots, tokens taken back."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.request import PassRequest
from kvsieve.store import PrefixStore
from small import ACTING, plan_of, stored
from tiny import greedy, tiny_prompt


def forked(sieve, cache, path):
    other = cache.fork()
    feed(sieve, cache, tiny_prompt(1, 5, seed=8)[0])
    return other


def saved(sieve, cache, path):
    sieve.save(cache, path)
    return sieve.load(path).cache


def rolled_back(sieve, cache, path):
    snapshot = cache.snapshot()
    feed(sieve, cache, tiny_prompt(1, 5, seed=8)[0])
    cache.rollback(snapshot)
    return cache


def taken_back(sieve, cache, path):
    tokens = tiny_prompt(1, 5, seed=8)
    sieve.feed(cache, tokens, None, PassRequest(tentative=True)).transaction.accept(0)
    return cache


def chosen(sieve, cache, path):
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def refused(sieve, cache, path):
    """Nothing that a call is refused for is left behind."""
    with pytest.raises(kvsieve.KvsieveError):
        sieve.model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 3), **{CACHE: cache})
    return cache


ROUTES = (forked, saved, rolled_back, taken_back, chosen, refused)


def feed(sieve, cache, tokens):
    for token in tokens:
        sieve.feed(cache, token[None, None], None)


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ACTING)
def test_an_answer_goes_on_as_if_nothing_had_been(model, name, tmp_path):
    new = tiny_prompt(1, 10, seed=3)[0]
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        cache = sieve.generate(tiny_prompt(1, 60), **greedy(max_new_tokens=5)).cache
        plain = cache.fork()
        feed(sieve, plain, new)
        for route in ROUTES:
            other = route(sieve, cache.fork(), tmp_path / route.__name__)
            feed(sieve, other, new)
            assert stored(other) == stored(plain), route.__name__


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ACTING)
def test_a_method_acts_on_the_answer_to_a_first_prompt_that_stayed_whole(model, name):
    ids = tiny_prompt(1, 60)
    with kvsieve.attach(model, plan_of(name, model, every=3, budget="40%")) as sieve:
        cache = sieve.generate(ids, reduce=False, **greedy(max_new_tokens=13)).cache
        assert min(cache.entries()) < cache.num_seen == 72


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("before", ["h2o", "roco"])
@pytest.mark.parametrize("name", [name for name in ACTING if name not in ("h2o", "roco")])
def test_another_plan_does_not_go_on_from_them(model, name, before):
    with kvsieve.attach(model, plan_of(before, model, every=3)) as sieve:
        first = sieve.generate(tiny_prompt(1, 60), **greedy(max_new_tokens=5))
    plain = first.cache.fork()
    for layer in plain.sieve_layers.values():
        layer.state = {}
    new = tiny_prompt(1, 10, seed=3)
    more = torch.cat([first.sequences[:, : first.cache.num_seen], new], 1)
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        found = []
        for cache in (first.cache, plain):
            sieve.generate(more, cache=sieve.adopt(cache), **greedy(max_new_tokens=8))
            found.append(stored(cache))
        assert found[0] == found[1]
        feed(sieve, plain, new[0])


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ACTING)
def test_the_next_turn_of_a_stored_conversation_is_that_of_its_cache(model, name, tmp_path):
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        first = sieve.generate(tiny_prompt(1, 60), **greedy(max_new_tokens=8))
        ids = first.sequences[0, : first.cache.num_seen].tolist()
        more = torch.tensor([[*ids, *tiny_prompt(1, 20, seed=3)[0].tolist()]])
        with PrefixStore(tmp_path) as store:
            store.add(sieve, ids, first.cache, 1.0)
        with PrefixStore(tmp_path) as store:
            found = store.find(sieve, more[0].tolist())
            assert found is not None and found.cache.num_seen == len(ids)
            caches = found.cache, first.cache
            answers = [sieve.generate(more, cache=cache, **greedy(max_new_tokens=9)).sequences for cache in caches]
        assert torch.equal(*answers) and stored(found.cache) == stored(first.cache)
