"""D2O: the merge with its moving threshold, and budgets of layers by the spread of their attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.core.allocation import allocate
from kvsieve.errors import PlanError
from kvsieve.methods import D2O, SnapKV
from kvsieve.methods.d2o import HeavyHitters, SpreadLayers
from merging import chosen, drawn, entries, listed, naive

KEYS = [[1.0, 0.0], [0.0, 1.0], [3.0, 1.0], [1.0, 2.0], [4.0, 0.0]]
VALUES = [[1.0], [2.0], [3.0], [4.0], [5.0]]


def test_the_merge_by_hand():
    # Largest cosines: 3 / sqrt 10 with slot 0, 2 / sqrt 5 with slot 1, 1 with slot 0. Their mean is 0.948.
    first, second = 3 / math.sqrt(10), 2 / math.sqrt(5)
    mean = (first + second + 1) / 3
    rule = D2O(base=listed(0, 1), sinks=0)
    ctx = entries(KEYS, VALUES)
    found = chosen(rule, ctx)
    assert second < mean <= first
    # Slots 2 and 4 reach the mean: (own + sum u e) / (1 + n). Slot 3 is lost.
    assert found.values[0, 0, :, 0].tolist() == pytest.approx([(1 + first * 3 + 5) / 3, 2.0])
    assert found.keys[0, 0].flatten().tolist() == pytest.approx([(1 + 3 * first + 4) / 3, first / 3, 0.0, 1.0])
    assert found.log_weight is None
    assert ctx.state["threshold"].tolist() == pytest.approx([mean])


def test_the_threshold_moves():
    rule = D2O(base=listed(0, 1), sinks=0, alpha=0.3, beta=0.7)
    ctx = entries(KEYS, VALUES)
    chosen(rule, ctx)
    before = float(ctx.state["threshold"])
    later = replace(entries([*KEYS[:2], [1.0, 1.0], [5.0, 1.0]]), state=ctx.state)
    alike = 1 / math.sqrt(2), 5 / math.sqrt(26)
    found = chosen(rule, later)
    after = 0.3 * before + 0.7 * sum(alike) / 2
    assert float(ctx.state["threshold"]) == pytest.approx(after)
    assert alike[0] < after < alike[1]
    assert found.keys[0, 0, 0].tolist() == pytest.approx([(1 + 5 * alike[1]) / 2, alike[1] / 2])


def test_the_threshold_is_that_of_all_heads_and_of_a_row_alone():
    rule, ctx = D2O(base=SnapKV(budget=20, window=3, kernel=1)), drawn((0, 11))
    found = chosen(rule, ctx)
    for row in range(2):
        largest = []
        for head in range(2):
            part = slice(head, head + 1)
            one = replace(
                ctx,
                keys=ctx.keys[row : row + 1, part],
                valid=None if ctx.valid is None else ctx.valid[row : row + 1],
            )
            kept = found.indices[row, head].tolist()
            first = 11 * row
            one_row = naive(one, {*kept, *range(first + 4)}, open_=[slot for slot in kept if slot >= first + 4])
            largest += [alike for alike, _ in one_row.values()]
        assert float(ctx.state["threshold"][row]) == pytest.approx(sum(largest) / len(largest))


def layers(evictor, contexts, length):
    """Let an evictor see the layers of one prompt in order; return the last layer's selections."""
    shared, found = {}, None
    counts = (evictor.entries(length),)
    for number, ctx in enumerate(contexts):
        one = replace(ctx, layer_idx=number, num_layers=len(contexts), shared=shared, state={})
        evictor.observe(one)
        found = evictor.select(one, counts)
    return found


def test_layers_with_even_attention_keep_more():
    contexts = [drawn((0,), size=50, seed=seed) for seed in range(4)]
    contexts[2].query.mul_(6)
    evictor = kvsieve.plan("d2o", budget=20, sinks=2, floor=0).evict
    found = layers(evictor, contexts, 50)
    spread = []
    for ctx in contexts:
        logits = torch.einsum("hgld,hnd->hgln", ctx.query[0].unflatten(0, (2, 2)), ctx.keys[0]) * ctx.scale
        logits = logits.masked_fill(torch.ones(50, 50, dtype=torch.bool).triu(1), float("-inf"))
        variance = logits.softmax(-1).sum(2).var(-1)
        spread.append(((variance - variance.min()) / (variance.max() - variance.min() + 1e-6)).mean())
    wanted = allocate([math.exp(-float(one)) for one in spread], 80, [12] * 4, [50] * 4)
    assert [found[layer].indices.shape[-1] for layer in range(4)] == wanted
    assert len(set(wanted)) > 1
    # Sinks, and half of the budget of 20 for the newest, stay in each layer.
    for layer in range(4):
        for head in found[layer].indices[0].tolist():
            assert {0, 1, *range(40, 50)} <= set(head)
        assert found[layer].values.shape[2] == wanted[layer]


def test_the_layers_merge_their_own_entries():
    contexts = [drawn((0,), size=40, seed=seed) for seed in range(3)]
    evictor = kvsieve.plan("d2o", budget=15, floor=0).evict
    found = layers(evictor, contexts, 40)
    for layer, ctx in enumerate(contexts):
        again = D2O(base=SnapKV(budget=15, window=3))._written(
            replace(ctx, state={}), replace(found[layer], keys=None, values=None)
        )
        assert torch.equal(again.keys, found[layer].keys)
        assert torch.equal(again.values, found[layer].values)


def test_refusals():
    with pytest.raises(PlanError, match="base must be HeavyHitters"):
        SpreadLayers(base=SnapKV(budget=0.2))
    with pytest.raises(PlanError, match="recent"):
        HeavyHitters(budget=0.2, recent=1.5)
    with pytest.raises(PlanError, match="4 sinks"):
        kvsieve.plan("d2o", budget=5)
