"""What a store costs a request does not grow with what it holds."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.hf import reuse
from kvsieve.hf.reuse import StoredPrefixes
from kvsieve.store import PrefixStore, content
from kvsieve.store.forest import Forest
from kvsieve.store.rules import Reuse
from small import plan_of
from tiny import tiny_prompt
from tiny_models import build


@pytest.fixture(scope="module")
def sieve():
    with kvsieve.attach(build("llama"), kvsieve.plan("full")) as attached:
        yield attached


def tokens(seed, count=40):
    return tiny_prompt(1, count, seed=seed, low=3)


def counting(monkeypatch, place, name):
    """Count the calls of a function of a module or class."""
    calls, own = [], vars(place)[name]
    monkeypatch.setattr(place, name, lambda *given, **more: calls.append(given) or own(*given, **more))
    return calls


def test_one_more_node_in_a_full_store(sieve, monkeypatch):
    """It makes the store work out the worth of the nodes that it changes, not of all."""
    worths, most = counting(monkeypatch, Forest, "saves"), []
    prompts = [(ids, sieve.prefill(ids)) for ids in map(tokens, range(20))]
    with PrefixStore() as store:
        size = store.add(sieve, prompts[0][0][0], prompts[0][1], 1.0).memory_bytes
    for many in (20, 160):
        with PrefixStore(memory=many * size) as store:
            for number in range(many + 40):
                if number == many:
                    store.add(sieve, prompts[0][0][0], prompts[0][1], 1.0, "the first that goes")
                    del worths[:]
                ids, cache = prompts[number % 20]
                store.add(sieve, ids[0], cache, 1.0, f"session {number}")
            stats = store.stats()
            assert stats.nodes == many and stats.memory_bytes == many * size
            most.append(len(worths))
            assert len(store._tiers._trees) == many
            store.remove(*(node.key for node in store.nodes()))
            assert len(store._tiers._trees) == 0 and store.stats().memory_bytes == 0
    assert most[0] == most[1] <= 2 * 40


def test_what_is_asked_for_stays_while_others_come_and_go(sieve):
    """In a store that is full all the time, which nodes are told of again and again."""
    ids, cache = tokens(1), sieve.prefill(tokens(1))
    with PrefixStore() as store:
        size = store.add(sieve, ids[0], cache, 1.0).memory_bytes
    with PrefixStore(memory=4 * size) as store:
        store.add(sieve, ids[0], cache, 1.0, "asked")
        for number in range(300):
            store.add(sieve, ids[0], cache, 1.0, str(number))
            assert store.find(sieve, [*ids[0].tolist(), 5], "asked") is not None
        assert {node.owner for node in store.nodes()} >= {"asked", "299"} and len(store.nodes()) == 4
        assert sum(map(len, store._tiers._leaves_memory._heaps.values())) < 100


def test_many_nodes_that_begin_alike(monkeypatch):
    """A search looks at those on its way, not at all that share a system prompt and cannot be cut."""
    looked = counting(monkeypatch, Reuse, "takes")
    with kvsieve.attach(build("lfm2"), kvsieve.plan("full")) as sieve, PrefixStore() as store:
        for seed in range(30):
            ids = torch.cat([tokens(0, 12), tokens(seed + 1, 8)], 1)
            assert store.add(sieve, ids[0], sieve.prefill(ids), 1.0).serves == "continuation"
        ids = torch.cat([tokens(0, 12), tokens(7, 8), tokens(99, 5)], 1)
        del looked[:]
        assert store.find(sieve, ids[0]).tokens == 20 and len(looked) == 1


def test_borders_are_not_compared_with_what_came_before(sieve, monkeypatch):
    """What a cache was stored as, or made of, is known to be its beginning; of others nothing is."""
    compared = counting(monkeypatch, content, "_equal")
    ids = tokens(3, 96)
    with PrefixStore() as store:
        cache = sieve.new_cache()
        sieve.begin(ids, cache=cache, chunk=16, progress=lambda done, _: store.add(sieve, ids[0], cache, 1.0))
        assert store.stats().added == 6 and not compared
        (node,) = store.nodes()
        stored = store.find(sieve, tokens(3, 96)[0], leave=0).cache
        longer = torch.cat([ids, tokens(4, 9)], 1)
        sieve.prefill(longer, cache=stored)
        assert store.add(sieve, longer[0], stored, 1.0).memory_bytes > 0 and not compared
        assert store.stats().memory_bytes == node.memory_bytes // 96 * 105
        # Rolled back and read again with other tokens: only what is alike is shared.
        other = torch.cat([ids, tokens(5, 9)], 1)
        before = sieve.prefill(ids)
        snapshot = before.snapshot()
        sieve.prefill(longer, cache=before)
        store.add(sieve, longer[0], before, 1.0, "other")
        before.rollback(snapshot)
        sieve.prefill(other, cache=before)
        store.add(sieve, other[0], before, 1.0, "other")
        assert compared
        found = store.find(sieve, [*other[0].tolist(), 5], "other").cache
        assert found.num_seen == 105
        for mine, theirs in zip(found.sieve_layers.values(), before.sieve_layers.values(), strict=True):
            assert torch.equal(mine.keys, theirs.keys)


def test_borders_of_a_long_prompt(sieve, monkeypatch):
    """Chunks that have doubled are one where prefixes are not cut from longer ones; and a border copies what is new."""
    monkeypatch.setattr(reuse, "LAST", 8)
    copied = counting(monkeypatch, content, "_own")

    def borders(sieve, count):
        del copied[:]
        with PrefixStore() as store:
            StoredPrefixes(store).generate(sieve, tokens(6, count), chunk=8, max_new_tokens=1, do_sample=False)
            return store.stats().added

    # With the end of the turn, of which the plan that acts leaves nothing for others.
    assert [borders(sieve, count) for count in (100, 200)] == [2, 2]
    assert sum(part.shape[2] for (part,) in copied if part.ndim == 4) == 200 * 2 * sieve.num_layers
    with kvsieve.attach(build("llama"), plan_of("fastkv", build("llama"))) as fastkv:
        assert [borders(fastkv, count) for count in (100, 200)] == [3, 4]
