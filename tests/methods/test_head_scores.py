"""HeadKV and CompressKV: budgets of heads, and votes of heads, by retrieval scores."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import CompressKV, HeadKV, SnapKV
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.planning.profiles import Fingerprint, Profile
from layers import context, kept
from scored import best, columns, kept_slots, moved, pooled, prompt, run, sizes, weights
from tiny import padded_prompt, tiny_model, tiny_prompt

SCORES = ((0.9, 0.1), (0.2, 0.8), (0.0, 0.0))


def headkv(budget, **options):
    return HeadKV(base=GroupedSnapKV(budget=budget, window=4, kernel=3), heads=SCORES, **options)


def test_budgets_of_heads_by_hand():
    # 10 less the window of 4 are 6; a pool of 3 for each of 6 heads. 18 in parts of 0.45, 0.05, 0.1, 0.4, 0, 0.
    counts = headkv(10, beta=2.0).head_counts([0, 1, 2], 40, 10)
    assert counts == [[7 + 8, 7 + 1], [7 + 2, 7 + 7], [7, 7]]
    # 6 // 1.2 is 5 and 1 is sure; 30 in all, of which the first head gets 13.5.
    assert headkv(10).head_counts([0, 1, 2], 40, 10) == [[5 + 14, 5 + 1], [5 + 3, 5 + 12], [5, 5]]
    # No head has more than 12 entries: the others share the rest.
    assert headkv(10).head_counts([0, 1, 2], 12, 10) == [[12, 12], [12, 12], [6, 6]]
    # A layer that keeps everything is left out.
    assert headkv(10, beta=2.0).head_counts([1, 2], 40, 10) == [[7 + 2, 7 + 10], [7, 7]]
    assert headkv(10, temperature=0.0).head_counts([0, 1, 2], 40, 10) == [[10, 10]] * 3


@pytest.mark.parametrize("length", [11, 20, 57])
def test_heads_keep_their_best_entries(length):
    parts = prompt(layers=3, length=length, batch=2, seed=length)
    evictor = headkv(10)
    found = run(evictor, parts, padding=[0, 5])
    for row, pad in enumerate((0, 5)):
        size = length - pad
        counts = evictor.head_counts([0, 1, 2], size, 10) if size > 10 else [[size] * 2] * 3
        assert sizes(found, row) == [[min(count, size) for count in layer] for layer in counts]
        assert size <= 10 or sum(map(sum, counts)) == 60
        for layer, (query, keys) in enumerate(parts):
            query, keys = query[row, :, pad:], keys[row, :, pad:]
            mass = weights(query, keys, 4).sum(1)[:, :-4].unflatten(0, (2, -1)).mean(1)
            for head in range(2):
                scores = pooled(mass[head].tolist(), 3, "max")
                wanted = best(scores, min(counts[layer][head], size) - 4) + list(range(size - 4, size))
                assert found[layer][row][head] == [pad + j for j in wanted]


def profile(model, heads=None):
    config = model.config
    heads = heads or [[0.5, 0.1 * layer] for layer in range(config.num_hidden_layers)]
    return Profile(Fingerprint.of(model), heads=heads)


def test_headkv_on_a_model_stays_within_the_total_while_decoding():
    model = tiny_model()
    ids = tiny_prompt(size=50)
    plan = kvsieve.plan("headkv", budget=20, profile=profile(model), window=4, kernel=3, every=4)
    ask = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids)
        counts = plan.evict.head_counts(range(4), 50, 20)
        assert [layer.store.valid.sum(-1)[0].tolist() for layer in cache.layers] == counts
        result = sieve.generate(ids, max_new_tokens=9, **ask)
    # It acted 8 tokens after the prompt; the last one is not fed.
    assert [layer.store.valid.sum(-1)[0].tolist() for layer in result.cache.layers] == counts


@pytest.mark.parametrize("name", ["headkv", "compresskv"])
def test_padded_rows_and_chunks_equal_rows_alone(name):
    model = tiny_model()
    ids, mask = padded_prompt(50, 9)
    plan = kvsieve.plan(name, budget="40%", profile=profile(model), window=4, kernel=3)
    with kvsieve.attach(model, plan) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
        parts = sieve.prefill(ids, mask, chunk=7)
    assert columns(together, 1) == columns(parts, 1) == moved(columns(alone), 9)


def test_voters():
    of_kv_heads = CompressKV(budget=20, heads=[[0.1, 0.9, 0.5, 0.2]])
    assert of_kv_heads.voting(0, 8, 4) == [2, 3, 4, 5]
    assert CompressKV(budget=20, heads=[[0.1, 0.9]]).voting(0, 14, 2) == list(range(7, 14))
    of_query_heads = CompressKV(budget=20, heads=[[0.1, 0.9, 0.5, 0.2, 0.9, 0.0]], voters=3)
    assert of_query_heads.voting(0, 6, 2) == [1, 2, 4]


@pytest.mark.parametrize("per_query", [False, True])
def test_compresskv_equals_the_slow_reference_in_padded_batches(per_query):
    ((query, keys),) = prompt(layers=1, heads=3, groups=2, length=40, batch=2, seed=3)
    heads = [[0.1, 0.2, 0.0, 0.3, 0.5, 0.2]] if per_query else [[0.1, 0.5, 0.4]]
    evictor = CompressKV(budget="40%", heads=heads, voters=3, window=4, kernel=3)
    voters = [1, 3, 4] if per_query else [2, 3, 4, 5]
    ctx = context(query, keys, padding=[0, 9], num_layers=1)
    for row, pad in enumerate((0, 9)):
        mass = weights(query[row, :, pad:], keys[row, :, pad:], 4).sum(1)[:, :-4]
        lines = [pooled(mass[head].tolist(), 3, "avg") for head in voters]
        size = 40 - pad
        wanted = best([sum(column) for column in zip(*lines, strict=True)], int(0.4 * size) - 4)
        assert kept(evictor, ctx, row) == [[pad + j for j in [*wanted, *range(size - 4, size)]]] * 3


def test_all_heads_voting_is_the_mean_of_snapkvs_scores():
    ((query, keys),) = prompt(layers=1, heads=2, groups=2, length=40, seed=4)
    ctx = context(query, keys, num_layers=1)
    voted = CompressKV(budget=12, heads=[[0.5, 0.4]], voters=4, window=4).context_scores(ctx)
    snap = SnapKV(budget=12, window=4, kernel=5).context_scores(ctx)
    assert torch.allclose(voted, snap.mean(1, keepdim=True).expand_as(snap))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: headkv(10, beta=0.5), "beta must be at least 1, got 0.5"),
        (lambda: headkv(10, temperature=-1.0), "temperature must be at least 0"),
        (lambda: HeadKV(heads=(("a",),)), "heads must be numbers"),
        (lambda: CompressKV(budget=20, heads=SCORES, voters=0), "voters must be a whole number of at least 1"),
        (lambda: CompressKV(budget=20, heads=SCORES, per_query_head=True), "leave per_query_head out"),
    ],
)
def test_wrong_parameters_are_refused(make, match):
    with pytest.raises(PlanError, match=match):
        make()


@pytest.mark.parametrize("evictor", [headkv(10), CompressKV(budget=12, heads=SCORES, window=4)])
def test_scores_of_another_model_are_refused(evictor):
    keys = torch.zeros(1, 2, 20, 2)
    with pytest.raises(PlanError, match="scores of 3 layers with 2 heads each, the model has 4 with 2"):
        evictor.select(context(keys, keys), (12,))


def test_both_need_a_profile():
    no_profile = "needs a profile with heads, and none of this model"
    for name in ("headkv", "compresskv"):
        with pytest.raises(PlanError, match=no_profile), kvsieve.attach(tiny_model(), kvsieve.plan(name)):
            pass


def test_heads_of_one_layer_share_what_compresskv_keeps():
    ((query, keys),) = prompt(layers=1, heads=2, groups=2, length=30, seed=5)
    ctx = context(query, keys, num_layers=1)
    found = kept_slots(CompressKV(budget=12, heads=[[0.5, 0.4]], window=4).select(ctx, (12,)))
    assert found[0] == found[1]
