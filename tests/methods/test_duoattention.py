"""DuoAttention: which heads keep everything, what the others keep, and that the total is the budget's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import DuoAttention
from kvsieve.planning.profiles import Fingerprint, Profile
from layers import context
from tiny import greedy, padded_prompt
from tiny_models import build

SCORES = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.0))


def columns(selection, row=0):
    """Kept slots of each head of a row."""
    real = selection.real()
    real = torch.ones_like(selection.indices, dtype=torch.bool) if real is None else real
    real = real[:, None].expand_as(selection.indices) if real.ndim == 2 else real
    return [selection.indices[row, head][real[row, head]].tolist() for head in range(selection.indices.shape[1])]


def test_by_hand():
    # 6 heads of 20 entries, 10 on average: 60 in all. Least 2 + 4; (10 - 6) / (20 - 6) of 6 heads: 1 retrieves.
    # 40 are left for 5 heads: 8 each, 2 sinks and the last 6.
    duo = DuoAttention(budget=10, heads=SCORES, sinks=2, recent=4)
    ctx = context(torch.zeros(1, 2, 20, 2), torch.zeros(1, 2, 20, 2), num_layers=3)
    stream = [0, 1, *range(14, 20)]
    assert columns(duo.select(ctx, (10,))) == [list(range(20)), stream]
    ctx = context(torch.zeros(1, 2, 20, 2), torch.zeros(1, 2, 20, 2), num_layers=3, layer_idx=2)
    assert columns(duo.select(ctx, (10,))) == [stream, stream]


@pytest.mark.parametrize(("stored", "budget"), [(20, 10), (101, 37), (1000, 999), (64, 64), (50, 7), (50, 3), (9, 2)])
def test_the_total_is_exact_and_the_best_heads_retrieve(stored, budget):
    duo = DuoAttention(budget=budget, heads=SCORES, sinks=2, recent=4)
    counts = [duo.head_counts([0, 1, 2], layer, stored, budget) for layer in range(3)]
    assert sum(map(sum, counts)) == 6 * budget
    order = [counts[i][j] for i, j in ((0, 0), (1, 1), (2, 0), (1, 0), (0, 1), (2, 1))]
    assert order == sorted(order, reverse=True) and max(order) <= stored


def test_a_budget_below_sinks_and_recent_makes_all_heads_stream():
    duo = DuoAttention(budget=10, heads=SCORES, sinks=8, recent=16)
    ctx = context(torch.zeros(1, 2, 40, 2), torch.zeros(1, 2, 40, 2), num_layers=3)
    assert columns(duo.select(ctx, (10,))) == [[0, 1, *range(32, 40)]] * 2


def test_padded_rows_equal_rows_alone():
    duo = DuoAttention(budget="50%", heads=SCORES, sinks=2, recent=4)
    keys = torch.zeros(2, 2, 40, 2)
    for layer in range(3):
        both = duo.select(context(keys, keys, padding=[0, 13], num_layers=3, layer_idx=layer), (20, 13))
        alone = duo.select(context(keys[:1, :, :27], keys[:1, :, :27], num_layers=3, layer_idx=layer), (13,))
        assert columns(both, 1) == [[slot + 13 for slot in head] for head in columns(alone)]


def test_memory_falls_and_streaming_heads_roll_while_decoding():
    torch.manual_seed(0)
    model = build("llama", dtype=torch.float64)
    heads = tuple((1.0 - layer / 10, 0.0) for layer in range(4))
    profile = Profile(Fingerprint.of(model), heads=heads)
    ids = torch.randint(2, 120, (1, 200))
    plan = kvsieve.plan("duoattention", budget="40%", profile=profile, sinks=4, recent=16, every=1)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids)
        stored = [
            layer.store.valid.sum(-1)[0].tolist() if layer.store.is_ragged else [layer.store.size] * 2
            for layer in cache.layers
        ]
        assert sum(map(sum, stored)) == 8 * 80 and stored[0][0] == 200 and stored[0][1] < 80
        entry = 2 * cache.layers[0].store.keys.shape[-1] * 8 + 4 + 2
        assert cache.nbytes() <= (8 * 80 + 4 * 2 * 64) * entry
        result = sieve.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
    store = result.cache.layers[0].store
    assert store.valid.sum(-1)[0].tolist() == [200 + 29, stored[0][1]]
    assert store.index[0, 1][store.valid[0, 1]].tolist()[:4] == [0, 1, 2, 3]
    assert store.index[0, 1][store.valid[0, 1]].tolist()[-1] == 228


def test_scores_of_another_model_are_refused():
    keys = torch.zeros(1, 2, 40, 2)
    with pytest.raises(PlanError, match="3 layers with 2 heads each, the model has 4 with 2 KV heads"):
        DuoAttention(budget=20, heads=SCORES).select(context(keys, keys), (20,))
    with pytest.raises(PlanError, match="0 layers with 0 heads each, the model has 4 with 2 KV heads"):
        kvsieve.plan("duoattention", budget=20).evict.select(context(keys, keys), (20,))
    no_profile = "needs a profile with heads, and none of this model.*kvsieve calibrate MODEL --parts heads"
    with pytest.raises(PlanError, match=no_profile), kvsieve.attach(build("llama"), kvsieve.plan("duoattention")):
        pass


def test_compensation_by_hand():
    """A head of 20 keeps 8: 2 sinks, entry 14 for itself and the 12 before it, and the last 5."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 20, 4, dtype=torch.float64).unbind()
    duo = DuoAttention(budget=10, heads=SCORES, sinks=2, recent=4, compensate=True)
    plain, found = (
        which.select(context(torch.zeros(1, 2, 20, 4), keys, values=values, num_layers=3), (10,))
        for which in (replace(duo, compensate=False), duo)
    )
    assert columns(found) == columns(plain) and plain.keys is None
    assert torch.equal(found.keys[0, 0], keys[0, 0]) and (found.log_weight[0, 0] == 0).all()
    kept = [0, 1, *range(15, 20)]
    for part, stored in ((found.keys, keys), (found.values, values)):
        own = part[0, 1, -8:]
        assert torch.equal(own[[0, 1, *range(3, 8)]], stored[0, 1, kept])
        assert torch.allclose(own[2], stored[0, 1, 2:15].mean(0))
    assert torch.allclose(found.log_weight[0, 1, -8:].exp(), torch.tensor([1.0, 1, 13, 1, 1, 1, 1, 1]))


def test_a_later_compensation_includes_the_earlier_one():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 12, 4, dtype=torch.float64).unbind()
    weight = torch.ones(1, 2, 12)
    weight[:, :, 2] = 9
    ctx = replace(context(torch.zeros(1, 2, 12, 4), keys, values=values, num_layers=3), log_weight=weight.log())
    found = DuoAttention(budget=8, heads=SCORES, sinks=2, recent=16, compensate=True).select(ctx, (8,))
    # A fifth of 8 is 1 sink; slots 1 to 4 leave, and 5 includes them: 1 + 9 + 1 + 1 + 1.
    assert columns(found) == [[0, *range(5, 12)]] * 2
    share = torch.tensor([1, 9, 1, 1, 1], dtype=torch.float64)[:, None] / 13
    assert torch.allclose(found.keys[:, :, 1], (keys[:, :, 1:6] * share).sum(2))
    assert torch.allclose(found.values[:, :, 1], (values[:, :, 1:6] * share).sum(2))
    assert torch.allclose(found.log_weight[:, :, 1].exp(), torch.tensor(13.0))


def test_weights_of_a_head_add_up_to_the_tokens_of_each_row():
    model = build("llama", dtype=torch.float64)
    scores = ((0.9, 0.1), (0.2, 0.8), (0.3, 0.0), (0.5, 0.4))
    plan = kvsieve.Plan(evict=DuoAttention(budget="50%", heads=scores, sinks=2, recent=4, compensate=True, every=2))
    ids, mask = padded_prompt(40, 13, seed=0)
    with kvsieve.attach(model, plan) as sieve:
        both = sieve.generate(ids, mask, **greedy(max_new_tokens=6))
        alone = sieve.generate(ids[1:, 13:], **greedy(max_new_tokens=6))
    assert both.sequences[1, 13:].tolist() == alone.sequences[0].tolist()
    assert max(both.stats.kv_entries) < 45
    for layer in both.cache.layers:
        weight = layer.store.log_weight.exp()
        weight = weight if layer.store.valid is None else weight * layer.store.valid
        assert torch.allclose(weight.sum(-1), torch.tensor([[45.0], [32.0]]).expand(2, 2))


def test_a_conversation_with_divided_heads_is_not_edited():
    assert "divided" in DuoAttention(budget=kvsieve.Budget(10), heads=SCORES).why_not_edited
