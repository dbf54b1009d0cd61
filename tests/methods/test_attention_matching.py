"""Attention Matching: a slow reference on its own path, padded rows, later turns, and what its steps gain."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

import kvsieve
from kvsieve.core.matching import bounded_least_squares
from kvsieve.errors import PlanError
from kvsieve.methods import AttentionMatching
from kvsieve.shared.prompt import answer_logits
from layers import context
from scored import read
from tiny import greedy, padded_prompt

PADDING = 9
OPTIONS = {"repeat_ids": (5, 6), "answer_ids": (8, 9, 10)}
RIDGE = 0.05
LOWER = torch.tensor(-3.0, dtype=torch.float64).exp()


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(53, PADDING, seed=0)


def naive(query, keys, values, scale, kept):
    """Slots, values and weights of a head: references [Q, D] of its group, entries [N, D]."""
    logits = query @ keys.T * scale
    scores = logits.softmax(-1).square().mean(0)
    slots = torch.tensor(sorted(sorted(range(len(keys)), key=lambda j: -scores[j])[:kept]))
    whole = (logits - logits.amax(1, keepdim=True)).exp()
    few = whole[:, slots]
    bounds = LOWER.expand(kept), (1 / LOWER).expand(kept)
    weights = bounded_least_squares(few.T @ few, few.T @ whole.sum(1), *bounds)
    mixed = (logits[:, slots] + weights.log()).softmax(-1)
    ridge = (RIDGE * (mixed.T @ mixed).diagonal().mean()).sqrt() * torch.eye(kept, dtype=torch.float64)
    wanted = torch.cat([logits.softmax(-1) @ values, ridge @ values[slots]])
    return slots, torch.linalg.lstsq(torch.cat([mixed, ridge]), wanted).solution, weights.log()


@contextlib.contextmanager
def slow_attention(model, found, size, kept, on_policy):
    """In passes over more than `size` stored entries, compact those before the attention of each layer."""

    def attend(module, query, keys, values, mask, scaling, **_):
        heads = keys.shape[1]
        bias = torch.zeros(heads, keys.shape[2], dtype=query.dtype)
        if keys.shape[2] > size:
            grouped = query[0].unflatten(0, (heads, -1)).flatten(1, 2)
            mine = [naive(grouped[h], keys[0, h, :size], values[0, h, :size], scaling, kept) for h in range(heads)]
            found[module.layer_idx] = mine
            if on_policy:
                first = torch.stack([keys[0, head, mine[head][0]] for head in range(heads)])
                worth, weights = (torch.stack([part[at] for part in mine]) for at in (1, 2))
                keys = torch.cat([first[None], keys[:, :, size:]], 2)
                values = torch.cat([worth[None], values[:, :, size:]], 2)
                bias = torch.cat([weights, bias[:, size:]], 1)
        new = query.shape[2]
        future = torch.ones(new, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - new + 1)
        groups = query.shape[1] // heads
        logits = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        logits = (logits + bias.repeat_interleave(groups, 0)[:, None]).masked_fill(future, -torch.inf)
        return (logits.softmax(-1) @ values.repeat_interleave(groups, 1)).transpose(1, 2), None

    AttentionInterface.register("slowly_compacted", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("slowly_compacted")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def slow_matched(model, ids, kept, on_policy):
    """Per layer and head, the naive compaction of a prompt [N]."""
    found, size = {}, len(ids)
    cache = DynamicCache(config=model.config)
    with slow_attention(model, found, size, kept, on_policy), torch.no_grad():
        model(ids[None], past_key_values=cache, use_cache=True)
        fed = torch.cat([torch.tensor([*OPTIONS["repeat_ids"], *OPTIONS["answer_ids"]]), ids])
        model(fed[None], past_key_values=cache, position_ids=torch.arange(size, size + len(fed))[None])
    return [found[layer] for layer in sorted(found)]


@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
def test_entries_equal_the_slow_reference_in_a_padded_batch(model, prompts, on_policy):
    ids, mask = prompts
    plan = kvsieve.plan("attentionmatching", budget="20%", ridge=RIDGE, on_policy=on_policy, **OPTIONS)
    caches = [read(model, plan, ids, mask), read(model, plan, ids, mask, chunk=11)]
    for row, pad in enumerate((0, PADDING)):
        true = ids[row, pad:]
        kept = int(0.2 * len(true))
        for layer, heads in enumerate(slow_matched(model, true, kept, on_policy)):
            for cache in caches:
                store = cache.layers[layer].store
                for head, (slots, values, weights) in enumerate(heads):
                    assert store.index[row, head, -kept:].tolist() == (slots + pad).tolist()
                    assert torch.allclose(store.values[row, head, -kept:], values, atol=1e-6)
                    assert torch.allclose(store.log_weight[row, head, -kept:].double(), weights, atol=1e-5)


def test_each_step_brings_the_answer_nearer_to_full_kv(model, prompts):
    ids = prompts[0][:1]
    steps = [{"biases": False, "values": False}, {"values": False}, {}]
    plans = [kvsieve.plan("attentionmatching", budget="25%", **step, **OPTIONS) for step in steps]
    assert [plan.evict.traits.writes for plan in plans] == [False, True, True]
    more = prompts[0][1:, -8:]
    missed = []
    full = answer(model, kvsieve.plan("full"), ids, more)
    for plan in plans:
        missed.append(float((answer(model, plan, ids, more) - full).square().mean()))
    assert missed[2] < missed[0]
    assert torch.equal(answer(model, plans[2], ids, more), answer(model, plans[2], ids, more))
    # With all entries it is the model itself.
    whole = kvsieve.plan("attentionmatching", budget=53, **OPTIONS)
    assert torch.equal(answer(model, whole, ids, more), full)


def answer(model, plan, ids, more):
    """Logits after further tokens, under a plan."""
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        return answer_logits(sieve, sieve.prefill(ids), more)


def test_a_later_turn_fits_the_entries_again(model, prompts):
    ids, mask = prompts
    plan = kvsieve.plan("attentionmatching", budget="40%", **OPTIONS)
    with kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids, mask, **greedy(max_new_tokens=3))
        more = torch.cat([first.sequences, ids[:, -6:]], 1)
        whole = torch.cat([mask, torch.ones_like(more[:, mask.shape[1] :])], 1)
        both = sieve.prefill(more, whole, cache=first.cache)
        alone = sieve.generate(ids[1:, PADDING:], **greedy(max_new_tokens=3))
        second = sieve.prefill(more[1:, PADDING:], cache=alone.cache)
    assert alone.sequences[0].tolist() == first.sequences[1, PADDING:].tolist()
    for layer in range(4):
        stored, single = both.layers[layer].store, second.layers[layer].store
        assert stored.lengths == tuple(int(0.4 * (more.shape[1] - pad)) for pad in (0, PADDING))
        kept = single.size
        assert (stored.index[1, :, -kept:] - PADDING).equal(single.index[0])
        assert torch.allclose(stored.values[1, :, -kept:], single.values[0], atol=1e-6)
        assert torch.allclose(stored.log_weight[1, :, -kept:], single.log_weight[0], atol=1e-4)


def test_what_is_kept_of_a_context_does_not_depend_on_the_question(model, prompts):
    ids = prompts[0][:1]
    plan = kvsieve.plan("attentionmatching", budget="40%", **OPTIONS)
    found = []
    for question in (ids[:, 40:44], ids[:, 48:]):
        prompt = torch.cat([ids[:, :40], question], 1)
        with kvsieve.attach(model, plan) as sieve:
            result = sieve.generate(prompt, question_tokens=question.shape[1], **greedy(max_new_tokens=2))
        found.append([layer.store.values[:, :, :16].clone() for layer in result.cache.layers])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_protected_entries_keep_their_values_and_weights(model, prompts):
    ids = prompts[0][:1]
    plan = kvsieve.plan("attentionmatching", budget=12, **OPTIONS)
    cache, full = read(model, plan, ids, protect=[(20, 24)]), read(model, kvsieve.plan("full"), ids)
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        for head in range(2):
            at = [layer.store.index[0, head].tolist().index(token) for token in range(20, 24)]
            assert torch.equal(layer.store.values[0, head, at], whole.store.values[0, head, 20:24])
            assert (layer.store.log_weight[0, head, at] == 0).all()


def test_references_are_evenly_spaced():
    """Of 4 tokens of a head's two query heads, 4 queries: tokens 1 and 3."""
    torch.manual_seed(0)
    query = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    keys = torch.randn(1, 1, 10, 3, dtype=torch.float64)
    states = {}

    class Passes:
        def state(self, layer_idx):
            return states

    def compacted(query, queries):
        evictor = AttentionMatching(budget=2, queries=queries, on_policy=False)
        ctx = context(query, torch.cat([keys[:, :, :6], keys[:, :, -query.shape[2] :]], 2))
        assert evictor._compact(Passes(), (2,), (query.shape[2],), ctx) is None
        return [states.pop(f"attention_matching_{name}") for name in ("slots", "values", "weight")]

    few, same = compacted(query, 4), compacted(query[:, :, [1, 3]], 100)
    assert all(torch.equal(one, other) for one, other in zip(few, same, strict=True))
    assert not torch.equal(few[1], compacted(query, 100)[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ridge": -1.0}, "ridge must be a number of at least 0"),
        ({"queries": 0}, "queries must be a whole number of at least 1"),
        ({"repeat_ids": "12"}, "AttentionMatching: repeat_ids must be token ids"),
        ({"biases": 1}, "biases must be True or False"),
        ({"every": 3}, "no parameter 'every'"),
    ],
    ids=["ridge", "queries", "ids", "biases", "every"],
)
def test_bad_parameters_are_refused(options, said):
    with pytest.raises(PlanError, match=said):
        kvsieve.plan("attentionmatching", **options)
