"""Merging on a tiny model: stored entries, later turns, padded batches, chunks, and merges while decoding."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from attend import asking
from kvsieve import attention
from kvsieve.attention import AttentionRequest, DenseEntries
from kvsieve.errors import PlanError
from kvsieve.methods import MeanMerge
from layers import context
from merging import entries, listed
from tiny import greedy, padded_prompt, tiny_prompt

PLANS = {
    "d2o": {"budget": 24, "every": 3},
    "kvmerger": {"budget": 30, "threshold": -1.0, "every": 4},
    "zeromerge": {"budget": 24, "residual": 0.2, "every": 2},
    "cam": {"base": "snapkv", "budget": 34, "every": 2, "span": 4},
    "merge": {"base": "knorm", "budget": 24, "rule": "mean:weights=true", "every": 3},
    "adakv": {"budget": 24, "window": 4, "merge": "mean:weights=true", "floor": 0},
}
NAMES = list(PLANS)


def plan_of(name):
    return kvsieve.plan(name, **PLANS[name])


def stored(cache, row):
    """Keys, values and weights of the real entries of a row, layer by layer and head by head."""
    found = []
    for layer in cache.sieve_layers.values():
        store = layer.store
        keys, values, index, valid = store.keys, store.values, store.index, store.valid
        weights = store.log_weight
        for head in range(keys.shape[1]):
            real = torch.ones_like(index[row, head], dtype=torch.bool)
            if valid is not None:
                real = valid.expand(-1, keys.shape[1], -1)[row, head]
            parts = [keys[row, head][real], values[row, head][real]]
            weight = None if weights is None else weights[row, head][real]
            found.append((*parts, torch.zeros(int(real.sum())) if weight is None else weight))
    return found


def close(one, other, most=1e-5):
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        for part, again in zip(ours, theirs, strict=True):
            assert part.shape == again.shape
            assert torch.allclose(part.double(), again.double(), atol=most)


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_merged_with_weights_are_attended_as_the_copies(copies):
    torch.manual_seed(0)
    keys, values = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    many = torch.arange(5).repeat(copies)
    ctx = entries(keys[many], values[many])
    found = MeanMerge(base=listed(*range(5)), sinks=0, weights=True).select(ctx, (5,))
    query = torch.randn(1, 3, 1, 8, dtype=torch.float64)
    merged, whole = (
        attention.attend(AttentionRequest(asking(query, 0.4), held))
        for held in (
            DenseEntries(found.keys, found.values, log_weight=found.log_weight),
            DenseEntries(ctx.keys, ctx.values),
        )
    )
    assert torch.allclose(merged, whole, atol=1e-6)


def test_the_first_layer_stores_the_merge_of_the_full_cache(model):
    ids = tiny_prompt(1, 50)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        whole = sieve.prefill(ids).sieve_layers[0].store
    rule = kvsieve.plan("knorm", budget=20, merge="mean:weights=true")
    ctx = context(torch.zeros_like(whole.keys).repeat(1, 2, 1, 1), whole.keys, values=whole.values)
    wanted = rule.evict.select(ctx, (20,))
    with kvsieve.attach(model, rule) as sieve:
        store = sieve.prefill(ids).sieve_layers[0].store
    assert torch.allclose(store.keys, wanted.keys)
    assert torch.allclose(store.values, wanted.values)
    assert torch.allclose(store.log_weight, wanted.log_weight)
    assert store.log_weight.exp().sum(-1).flatten().tolist() == pytest.approx([46.0 + 4] * 2, abs=4.01)


@pytest.mark.parametrize("name", NAMES)
def test_two_turns_stay_within_the_budget(model, name):
    with kvsieve.attach(model, plan_of(name)) as sieve:
        first = sieve.generate(tiny_prompt(1, 60), max_new_tokens=13, **greedy())
        more = torch.cat([first.sequences, tiny_prompt(1, 20, seed=1)], 1)
        second = sieve.generate(more, cache=first.cache, max_new_tokens=13, **greedy())
        assert all(torch.isfinite(part).all() for row in stored(second.cache, 0) for part in row)
    budget = PLANS[name]["budget"]
    assert sum(second.stats.kv_entries) == pytest.approx(4 * budget, abs=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_is_the_row_in_a_padded_batch(model, name):
    ids, mask = padded_prompt(64, 15)
    plan = plan_of(name)
    with kvsieve.attach(model, plan) as sieve:
        both = sieve.generate(ids, mask, max_new_tokens=9, **greedy())
        for row, padding in enumerate((0, 15)):
            alone = sieve.generate(ids[row : row + 1, padding:], max_new_tokens=9, **greedy())
            assert torch.equal(both.sequences[row, 64:], alone.sequences[0, 64 - padding :])
            close(stored(both.cache, row), stored(alone.cache, 0))


@pytest.mark.parametrize("name", NAMES)
def test_chunks_equal_one_shot(model, name):
    with kvsieve.attach(model, plan_of(name)) as sieve:
        whole, parts = (
            sieve.generate(tiny_prompt(1, 60), max_new_tokens=7, chunk=chunk, **greedy()) for chunk in (None, 40)
        )
    assert torch.equal(whole.sequences, parts.sequences)
    close(stored(whole.cache, 0), stored(parts.cache, 0))


def test_weights_count_all_tokens(model):
    """With the mean's weights every token but evicted sinks counts in some entry."""
    plan = kvsieve.plan("knorm", budget=20, merge="mean:weights=true:sinks=0", every=1)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.generate(tiny_prompt(1, 50), max_new_tokens=11, **greedy()).cache
    for _, _, weight in stored(cache, 0):
        assert len(weight) == 20
        assert float(weight.exp().sum()) == pytest.approx(60, rel=1e-4)


def test_protected_tokens_are_stored_as_without_merging(model):
    ids = tiny_prompt(1, 60)
    spans = [(20, 24)]
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        whole = sieve.prefill(ids).sieve_layers[0].store
    for name in NAMES:
        with kvsieve.attach(model, plan_of(name)) as sieve:
            store = sieve.prefill(ids, protect=spans).sieve_layers[0].store
        for head in range(2):
            slots = store.index[0, head].tolist()
            for token in range(20, 24):
                assert torch.equal(store.keys[0, head, slots.index(token)], whole.keys[0, head, token])
                assert torch.equal(store.values[0, head, slots.index(token)], whole.values[0, head, token])


def test_codecs_and_rests_are_refused():
    for more in ({"codec": "kivi"}, {"rest": "2bit"}):
        with pytest.raises(PlanError, match="writes"):
            kvsieve.plan("snapkv", budget="10%", merge="mean", **more)
