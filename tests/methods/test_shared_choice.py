"""Choices shared by layers: ChunkKV's index reuse, and WindowKV's groups."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import ChunkKV, EntropyChunkKV, SnapKV, WindowKV
from layers import context, kept
from scored import Given, given, prompt, run, sizes, weights
from tiny import padded_prompt, tiny_model

BASE = SnapKV(budget=16, window=4, kernel=3)


@pytest.mark.parametrize("kind", [ChunkKV, EntropyChunkKV])
@pytest.mark.parametrize("share", [1, 2, 3, 9])
def test_the_first_layer_of_a_group_chooses(kind, share):
    parts = prompt(layers=5, length=40, batch=2)
    alone = run(kind(base=BASE), parts, padding=[0, 7])
    shared = run(kind(base=BASE, share=share), parts, padding=[0, 7])
    assert shared == [alone[layer // share * share] for layer in range(5)]
    assert len({str(layer) for layer in alone}) == 5


def test_layers_that_keep_everything_are_in_no_group():
    parts = prompt(layers=5, length=40)
    base = SnapKV(budget=16, window=4, kernel=3, skip_layers=(1,))
    alone = run(ChunkKV(base=base), parts)
    shared = run(ChunkKV(base=base, share=2), parts)
    assert shared == [alone[0], alone[1], alone[0], alone[3], alone[3]]


def test_a_layer_with_other_entries_keeps_the_same_tokens():
    evictor = ChunkKV(base=Given(budget=3), chunk_length=1, share=2)
    ctx = given([[[1.0, 5, 2, 4, 3]]], num_layers=2)
    assert kept(evictor, ctx) == [[1, 3, 4]]
    later = given([[[0.0] * 4]], num_layers=2, layer_idx=1)
    later.shared = ctx.shared
    # This layer has lost token 3.
    later.index = torch.tensor([[[0, 1, 2, 4]]], dtype=torch.int32)
    later.step = ctx.step
    assert evictor.ranks(later, (3,))[0, 0].argsort(descending=True)[:3].tolist() == [1, 3, 2]


def test_sharing_on_a_model():
    ids, mask = padded_prompt(50, 9)
    base = SnapKV(budget="40%", window=4, kernel=3)
    plan = kvsieve.Plan(evict=ChunkKV(base=base, chunk_length=4, share=4))
    with kvsieve.attach(tiny_model(), plan) as sieve:
        caches = [sieve.prefill(ids, mask), sieve.prefill(ids, mask, chunk=11)]
        alone = sieve.prefill(ids[1:, 9:])
    for cache in caches:
        first = cache.layers[0].store.index
        assert all(torch.equal(layer.store.index, first) for layer in cache.layers)
        assert (first[1:, :, -16:] - 9).tolist() == alone.layers[3].store.index.tolist()


def test_budgets_of_groups_by_hand():
    evictor = WindowKV(base=SnapKV(budget=60, window=4, kernel=1), share=2, beta=14)
    # 56 on average; the last of 3 groups gets 2 / 14 of it, 8, the first 104.
    assert evictor.divide(range(6), 1000, 60, 5) == [108, 108, 60, 60, 12, 12]
    # The last group may have fewer layers; one group is uniform.
    assert evictor.divide(range(5), 1000, 60, 5)[-1] < evictor.divide(range(5), 1000, 60, 5)[0]
    assert sum(evictor.divide(range(5), 1000, 60, 5)) == 300
    assert evictor.divide(range(2), 1000, 60, 5) == [60, 60]
    assert sum(evictor.divide(range(6), 70, 60, 5)) == 360 and max(evictor.divide(range(6), 70, 60, 5)) <= 70


@pytest.mark.parametrize("rule", ["average", "max"])
def test_windowkv_equals_the_slow_reference_in_padded_batches(rule):
    parts = prompt(layers=4, heads=2, groups=2, length=60, batch=2, seed=2)
    evictor = WindowKV(base=SnapKV(budget="40%", window=4, kernel=1), length=8, rule=rule, share=2, beta=3)
    found = run(evictor, parts, padding=[0, 13])
    for row, pad in enumerate((0, 13)):
        size = 60 - pad
        counts = evictor.divide(range(4), size, int(0.4 * size), 5)
        assert sizes(found, row) == [[min(count, size)] * 2 for count in counts]
        for layer in range(4):
            query, keys = parts[layer // 2 * 2]
            mass = weights(query[row, :, pad:], keys[row, :, pad:], 4).sum(1)[:, :-4].unflatten(0, (2, -1)).mean(1)
            windows = [range(start, min(start + 8, size - 4)) for start in range(0, size - 4, 8)]
            scored = []
            for part in windows:
                lines = [sorted((head[j] for j in part), reverse=True) for head in mass.tolist()]
                used = len(part) if rule == "average" else min(4, len(part))
                scored.append(sum(sum(line[:used]) for line in lines) / used)
            order = sorted(range(len(windows)), key=lambda at: (-scored[at], at))
            wanted = [j for at in order for j in windows[at]][: min(counts[layer], size) - 4]
            assert found[layer][row] == [[pad + j for j in [*sorted(wanted), *range(size - 4, size)]]] * 2


def test_windows_of_one_token_are_the_base_with_heads_shared():
    ((query, keys),) = prompt(layers=1, heads=1, groups=2, length=40)
    ctx = context(query, keys, num_layers=1)
    assert kept(WindowKV(base=SnapKV(budget=16, window=4, kernel=1), length=1), ctx) == kept(
        SnapKV(budget=16, window=4, kernel=1), ctx
    )


def test_windowkv_on_a_model():
    ids, mask = padded_prompt(50, 9)
    plan = kvsieve.plan("windowkv", budget="40%", window=4, length=4, share=2)
    with kvsieve.attach(tiny_model(), plan) as sieve:
        caches = [sieve.prefill(ids, mask), sieve.prefill(ids, mask, chunk=11)]
        alone = sieve.prefill(ids[1:, 9:])
    assert sum(alone.entries()) == 4 * 16 and sum(caches[0].entries()) == 4 * 20
    for layer, part, one in zip(caches[0].layers, caches[1].layers, alone.layers, strict=True):
        size = one.store.entries
        assert torch.equal(layer.store.index, part.store.index)
        assert (layer.store.index[1:, :, -size:] - 9).tolist() == one.store.index.tolist()


@pytest.mark.parametrize("name", ["length", "share", "beta"])
def test_wrong_parameters_are_refused(name):
    with pytest.raises(PlanError, match=f"{name} must be a whole number of at least 1, got 0"):
        WindowKV(**{name: 0})
    with pytest.raises(PlanError, match="share must be a whole number of at least 1, got 0"):
        ChunkKV(base=BASE, share=0)
    with pytest.raises(PlanError, match="rule"):
        kvsieve.plan("windowkv", rule="median")
