"""The rule of reuse: an answer that goes on from what is found is that of the unbroken reading, for every method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvsieve
from kvsieve.planning.registry import method_info
from kvsieve.store import PrefixStore
from kvsieve.store.rules import tells_answers_apart
from small import plan_of
from tiny import greedy
from tiny_models import build

GREEDY = greedy(max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
METHODS = kvsieve.list_methods()
DOCUMENT, PROMPT = 64, 100
CHUNK = 32


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def talk():
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 120, (1, PROMPT), generator=made)
    other = ids.clone()
    other[:, -6:] = torch.randint(2, 120, (1, 6), generator=made)
    other[:, -6] = (ids[:, -6] + 1) % 100 + 2
    return ids, other, torch.randint(2, 120, (1, 40), generator=made)


def read(sieve, ids, cache=None, until=DOCUMENT):
    """The unbroken reading of a prompt, up to a border as its leading chunks."""
    cache = sieve.begin(ids[:, :until], cache=cache, chunk=CHUNK) if until else cache
    return sieve.generate(ids, cache=cache, chunk=CHUNK, **GREEDY)


def same(one, other):
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(torch.stack(one.output.logits), torch.stack(other.output.logits))


@pytest.mark.parametrize("name", METHODS)
def test_reuse_never_changes_an_answer(model, path, talk, name):
    ids, other, more = talk
    with kvsieve.attach(model, plan_of(name, model)) as sieve, PrefixStore(path) as store:
        if sieve.plan.shortens_prompt or sieve.plan.scores_entries:
            result = sieve.generate(ids, **GREEDY)
            assert store.add(sieve, result.sequences[0], result.cache, 1.0) is None and store.stats().refused == 1
            return
        cache = sieve.begin(ids[:, :DOCUMENT], chunk=CHUNK)
        half = store.add(sieve, ids[0], cache, 1.0, chunk=CHUNK)
        first = sieve.generate(ids, cache=cache, chunk=CHUNK, **GREEDY)
        end = store.add(sieve, first.sequences[0], cache, 2.0, chunk=CHUNK)
        assert half.tokens == DOCUMENT and end.tokens == PROMPT + 1
        found = store.find(sieve, ids[0], turns=(PROMPT,), chunk=CHUNK)
        unbroken = first if found.tokens == DOCUMENT else read(sieve, ids, until=found.tokens)
        same(sieve.generate(ids, cache=found.cache, chunk=CHUNK, **GREEDY), unbroken)
        longer = torch.cat([first.sequences, more], 1)
        second = read(sieve, longer, cache, until=0)
        goes_on(sieve, store, longer, second)
        another_question(sieve, store, other)
        # Neither does what was on the disk, mapped into memory.
        store.flush()
        store._tiers._memory = 0
        store._tiers._fit_memory()
        goes_on(sieve, store, longer, second)
        assert store.stats().disk_hits and not store.stats().damaged and not store.stats().memory_bytes
        store.remove(*(each.key for each in store.nodes()))


def another_question(sieve, store, other):
    """Another question on the same document never meets entries that were chosen in the light of the first."""
    found = store.find(sieve, other[0], turns=(PROMPT,), chunk=CHUNK)
    assert found.tokens == DOCUMENT or (
        DOCUMENT < found.tokens <= PROMPT - 6 and not sieve.plan.drops and sieve.plan.prefill is None
    )
    answer = sieve.generate(other, chunk=CHUNK, **GREEDY)
    result = sieve.generate(other, cache=found.cache, chunk=CHUNK, **GREEDY)
    assert torch.equal(result.sequences, answer.sequences)
    torch.testing.assert_close(torch.stack(result.output.logits), torch.stack(answer.output.logits))


def goes_on(sieve, store, longer, second):
    """A conversation goes on from its last turn; who would have ended a prompt elsewhere gets no reduced entries."""
    found = store.find(sieve, longer[0])
    assert found.tokens == PROMPT + 1
    same(sieve.generate(longer, cache=found.cache, chunk=CHUNK, **GREEDY), second)
    # Read anew, its answer would be read as the next prompt's beginning.
    plan, ends = sieve.plan, longer.shape[1]
    own = tells_answers_apart(plan)
    anew = store.find(sieve, longer[0], turns=(PROMPT, ends), chunk=CHUNK)
    assert (anew is not None and anew.tokens == PROMPT + 1) is not own
    if not own:
        cache = sieve.prefill(longer[:, :PROMPT], chunk=CHUNK)
        answer = sieve.generate(longer, cache=cache, chunk=CHUNK, **GREEDY)
        assert torch.equal(sieve.generate(longer, cache=anew.cache, **GREEDY).sequences, answer.sequences)
    elsewhere = store.find(sieve, longer[0], turns=(PROMPT + 3, ends), chunk=CHUNK)
    assert elsewhere is None or (elsewhere.tokens == PROMPT + 1) is not (plan.drops or own)


def test_every_method_says_whether_it_is_query_aware(model):
    """And the trait agrees with what its table says, for all that choose tokens or entries."""
    for name in METHODS:
        plan = method_info(name).make(**method_info(name).example)
        for part in (plan.propagate, plan.evict):
            if part is not None:
                assert part.traits.query_aware is not None, name
                assert plan.query_aware is method_info(name).query_aware, name


def chooses_at_the_end(name):
    """Tell that a method is said not to look at queries, and chooses entries at a prompt's end."""
    info = method_info(name)
    evict = info.make(**info.example).evict
    return not info.query_aware and evict is not None and not evict.when.observes


@pytest.mark.parametrize("name", [each for each in METHODS if chooses_at_the_end(each)])
def test_what_is_not_query_aware_looks_at_no_query_at_the_end(model, talk, name, monkeypatch):
    """The trait is true: with other queries it chooses the same entries."""
    from kvsieve.hf.forward import session

    plan = plan_of(name, model)
    own = session.evict

    def kept(evict):
        monkeypatch.setattr(session, "evict", evict)
        with kvsieve.attach(model, plan) as sieve:
            cache = sieve.prefill(talk[0])
        return [np.sort(layer.store.index.numpy()) for layer in cache.sieve_layers.values()]

    def with_other_queries(plan, ctx, cache, due):
        ctx.query = torch.randn_like(ctx.query)
        own(plan, ctx, cache, due)

    assert all(np.array_equal(*each) for each in zip(kept(own), kept(with_other_queries), strict=True))


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_models_with_other_layers(family, name, talk, path):
    model = build(family, dtype=torch.float64)
    ids, other, more = (each % 90 + 2 for each in talk)
    with kvsieve.attach(model, plan_of(name, model)) as sieve, PrefixStore(path) as store:
        cache = sieve.new_cache()

        def border(done, total):
            store.add(sieve, ids[0], cache, done / total)

        sieve.begin(ids[:, :DOCUMENT], cache=cache, chunk=CHUNK, progress=border)
        first = sieve.generate(ids, cache=cache, chunk=CHUNK, **GREEDY)
        store.add(sieve, first.sequences[0], cache, 2.0)
        longer = torch.cat([first.sequences, more], 1)
        second = read(sieve, longer, cache, until=0)
        plain = not any(layer.window is not None or layer.has_state for layer in cache.layers)
        store.flush()
        for _ in range(2):
            found = store.find(sieve, longer[0])
            assert found.tokens == PROMPT + 1
            same(sieve.generate(longer, cache=found.cache, chunk=CHUNK, **GREEDY), second)
            found = store.find(sieve, other[0], turns=(PROMPT,))
            assert found.tokens == (PROMPT - 6 if plain and name == "full" else DOCUMENT)
            result = sieve.generate(other, cache=found.cache, chunk=CHUNK, **GREEDY)
            same(result, read(sieve, other, until=found.tokens))
            store._tiers._memory = 0
            store._tiers._fit_memory()
        assert store.stats().memory_nodes == 0
        store.remove(*(each.key for each in store.nodes()))
