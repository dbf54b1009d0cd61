"""Merging dropped entries into kept ones: the mean, the parts that never change, and `merge=` of plans by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.core import merging
from kvsieve.errors import PlanError
from kvsieve.methods import CAKE, D2O, AdaKV, CaM, KVMerger, KVzip, MeanMerge, PerTurn, SnapKV, ZeroMerge
from kvsieve.methods.merged import RULES
from kvsieve.planning.budget import Budget
from merging import chosen, drawn, entries, listed, row_of

KEYS = [[1.0, 0.0], [0.0, 1.0], [2.0, 0.2], [0.1, 1.0], [3.0, 0.0], [-1.0, -1.0]]
VALUES = [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]]


def softmax_of(query, keys, values, log_weight=None):
    logits = keys @ query if log_weight is None else keys @ query + log_weight.double()
    return logits.softmax(-1) @ values


def test_the_mean_by_hand():
    # Slots 2 and 4 are nearest to slot 0, slot 3 to slot 1; slot 5 is as near to both, so it goes to slot 0.
    rule = MeanMerge(base=listed(0, 1), sinks=0)
    found = chosen(rule, entries(KEYS, VALUES))
    assert found.indices.tolist() == [[[0, 1]]]
    assert torch.allclose(found.keys[0, 0], torch.tensor([[1.25, -0.2], [0.05, 1.0]], dtype=torch.float64))
    assert torch.allclose(found.values[0, 0], torch.tensor([[3.75], [3.0]], dtype=torch.float64))
    assert found.log_weight is None


def test_the_mean_without_distant_entries_or_keys_and_with_weights():
    rule = MeanMerge(base=listed(0, 1), sinks=0, threshold=0.5, keys=False, weights=True)
    found = chosen(rule, entries(KEYS, VALUES))
    assert found.keys is None
    assert torch.allclose(found.values[0, 0], torch.tensor([[3.0], [3.0]], dtype=torch.float64))
    assert found.log_weight.dtype == torch.float32
    assert found.log_weight[0, 0].exp().tolist() == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize("copies", [2, 5])
def test_copies_merged_with_weights_are_attended_as_the_copies(copies):
    torch.manual_seed(0)
    keys, values, query = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (4, 3), (6,)))
    many = torch.arange(4).repeat(copies)
    ctx = entries(keys[many], values[many])
    found = chosen(MeanMerge(base=listed(*range(4)), sinks=0, weights=True), ctx)
    ours = softmax_of(query, found.keys[0, 0], found.values[0, 0], found.log_weight[0, 0])
    assert torch.allclose(ours, softmax_of(query, keys[many], values[many]), atol=1e-7)


def test_earlier_weights_count():
    ctx = entries([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [[1.0], [0.0], [5.0]])
    ctx = replace(ctx, log_weight=torch.tensor([[[math.log(3), 0.0, 0.0]]]))
    found = chosen(MeanMerge(base=listed(0, 1), sinks=0, weights=True), ctx)
    assert found.values[0, 0, :, 0].tolist() == pytest.approx([2.0, 0.0])
    assert found.log_weight[0, 0].exp().tolist() == pytest.approx([4.0, 1.0])


def test_the_nearest_in_blocks_is_the_nearest(monkeypatch):
    torch.manual_seed(1)
    dropped, kept = torch.randn(2, 3, 100, 5), torch.randn(2, 3, 40, 5)
    targets = torch.rand(2, 3, 40) < 0.7
    whole = merging.nearest(dropped, kept, targets)
    monkeypatch.setattr(merging, "_BLOCK_ELEMENTS", 1)
    parts = merging.nearest(dropped, kept, targets)
    assert torch.equal(whole[1], parts[1])
    assert torch.allclose(whole[0], parts[0])
    assert targets.gather(2, whole[1]).all()


def rules(base, **more):
    return [
        MeanMerge(base=base, weights=True, **more),
        D2O(base=base, **more),
        KVMerger(base=base, threshold=-1.0, **more),
        ZeroMerge(base=base, **more),
    ]


@pytest.mark.parametrize("rule", range(4))
def test_protected_entries_and_sinks_never_change(rule):
    ctx = drawn((0,), size=30)
    fixed = torch.zeros(1, 2, 30, dtype=torch.bool)
    fixed[..., [7, 8, 20]] = True
    ctx = replace(ctx, protected=fixed)
    evictor = rules(SnapKV(budget=14, window=3, kernel=1), sinks=2)[rule]
    found = chosen(evictor, ctx)
    changed = 0
    for head in range(2):
        for place, slot in enumerate(found.indices[0, head].tolist()):
            same = torch.equal(found.keys[0, head, place], ctx.keys[0, head, slot])
            same &= torch.equal(found.values[0, head, place], ctx.values[0, head, slot])
            same &= found.log_weight is None or not found.log_weight[0, head, place]
            changed += not same
            assert same or slot not in (0, 1, 7, 8, 20)
    assert changed
    # Dropped sinks take no part either: without those, the others merge as before.
    kept = listed(*range(10, 20))
    ctx = drawn((0,), size=30)
    huge = replace(ctx, keys=ctx.keys.clone(), values=ctx.values.clone())
    huge.keys[:, :, :2] *= -1e6
    huge.values[:, :, :2] = 1e6
    ours, theirs = (chosen(rules(kept, sinks=2)[rule], one) for one in (ctx, huge))
    assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("rule", range(4))
def test_a_row_alone_is_the_row_in_a_padded_batch(rule):
    evictor = rules(SnapKV(budget="30%", window=3, kernel=1))[rule]
    both = chosen(evictor, drawn((0, 17)))
    for row, padding in enumerate((0, 17)):
        ctx = drawn((0,))
        ctx = replace(
            ctx,
            keys=ctx.keys[:, :, padding:],
            values=ctx.values[:, :, padding:],
            query=ctx.query[:, :, padding:],
            index=ctx.index[:, :, padding:] - padding,
            stored=(60 - padding,),
            step=replace(ctx.step, lengths=(60 - padding,), turn_lengths=(60 - padding,), num_new=60 - padding),
        )
        slots, *alone = row_of(chosen(evictor, ctx), 0)
        together = row_of(both, row)
        assert torch.equal(slots + padding, together[0])
        for ours, theirs in zip(alone, together[1:], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.allclose(ours, theirs)


@pytest.mark.parametrize("rule", range(4))
def test_nothing_evicted_nothing_written(rule):
    evictor = rules(SnapKV(budget=40, window=3))[rule]
    assert chosen(evictor, drawn((0,), size=30)) is None
    # All that would merge are sinks.
    ctx = drawn((0,), size=30)
    found = chosen(rules(listed(*range(4, 30)), sinks=4)[rule], ctx)
    assert torch.equal(found.keys, ctx.keys[:, :, 4:])
    assert torch.equal(found.values, ctx.values[:, :, 4:])
    assert found.log_weight is None or not found.log_weight.any()


@pytest.mark.parametrize("rule", range(4))
def test_heads_with_different_numbers_of_entries_merge_by_themselves(rule):
    evictor = rules(AdaKV(base=SnapKV(budget=16, window=3, kernel=1), alpha=0.0), sinks=0)[rule]
    ctx = drawn((0,), size=40)
    ctx.keys[:, 0] *= 3
    found = chosen(evictor, ctx)
    counts = found.head_lengths[0]
    assert counts[0] != counts[1]
    assert evictor.traits.ragged and evictor.traits.writes
    assert all(part is None or part.isfinite().all() for part in (found.keys, found.values, found.log_weight))


def test_bases_that_cannot_be_merged_are_refused():
    snapkv = SnapKV(budget=0.2)
    for base, reason in (
        (PerTurn(base=snapkv), "drops nothing"),
        (MeanMerge(base=snapkv), "writes entries itself"),
        (SnapKV(budget=0.2, per_query_head=True), "each query head"),
        (CAKE(), "bit by bit"),
        (KVzip(budget=0.2), "passes of its own"),
    ):
        with pytest.raises(PlanError, match=reason):
            MeanMerge(base=base)
    for wrong in ({"threshold": 1.5}, {"sinks": -1}, {"weights": 1}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            MeanMerge(base=snapkv, **wrong)
    with pytest.raises(PlanError, match="threshold"):
        KVMerger(base=snapkv, threshold=-2.0)
    with pytest.raises(PlanError, match="alpha"):
        D2O(base=snapkv, alpha=-0.1)


def test_plans_by_name_merge():
    assert type(kvsieve.plan("snapkv:budget=10%:merge=zeromerge").evict) is ZeroMerge
    assert kvsieve.plan("snapkv", budget=50, merge="mean:weights=true").evict == MeanMerge(
        base=SnapKV(budget=Budget(tokens=50), window=25), weights=True
    )
    for name, kind in RULES.items():
        plan = kvsieve.plan("fastkv", merge=name)
        assert type(plan.evict) is kind
        assert plan.propagate is not None
        assert kvsieve.Plan.from_dict(plan.to_dict()) == plan
    assert set(RULES.values()) == {MeanMerge, D2O, KVMerger, ZeroMerge, CaM}
    for method, rule, reason in (
        ("full", "mean", "evicts nothing to merge"),
        ("snapkv", "means", "did you mean 'mean'"),
        ("snapkv", 5, "takes a rule"),
        ("snapkv", "mean:weight=1", "did you mean 'weights'"),
        ("d2o", "mean", "writes entries itself"),
    ):
        with pytest.raises(PlanError, match=reason):
            kvsieve.plan(method, merge=rule)


def test_parameters_of_the_model_are_filled_in_below_the_merge(model):
    for method in ("snapkv", "criticalkv", "adakv"):
        plain, merged = (
            kvsieve.plan(method, budget=50, **more).for_model(model) for more in ({}, {"merge": "mean:weights=true"})
        )
        assert merged.evict == MeanMerge(base=plain.evict, weights=True)
        assert merged.filled == plain.filled
    cam = kvsieve.plan("cam", base="snapkv", budget=50, every=4)
    assert type(cam.for_model(model).evict.base) is SnapKV
    assert cam.for_model(model).evict.base.every == 4
