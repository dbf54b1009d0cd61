"""ZeroMerge: decayed scores, slots with weights at the end of a prompt, and merges into slots later."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import ZeroMerge
from kvsieve.methods import zeromerge as module
from kvsieve.methods.zeromerge import ThreeParts, decayed_mass, is_slot
from kvsieve.types import Step
from layers import context
from merging import chosen, drawn, entries, listed


def naive_scores(ctx, decay, head):
    first = ctx.keys.shape[2] - ctx.step.lengths[0]
    query, keys = ctx.query[0, 2 * head : 2 * head + 2, first:], ctx.keys[0, head, first:]
    length = len(keys)
    logits = (query @ keys.T * ctx.scale).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    factor = decay ** torch.arange(length - 1, -1, -1, dtype=torch.float64)
    return (logits.softmax(-1) * factor[:, None]).sum(1).mean(0)


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_scores_decay_with_every_token(padding, decay, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 16)
    ctx = drawn((padding,), size=50)
    mass, factor = decayed_mass(ctx, decay)
    assert factor.flatten().tolist() == pytest.approx([decay ** (50 - padding)])
    for head in range(2):
        assert torch.allclose(mass[0, head, padding:], naive_scores(ctx, decay, head))
    # In two passes it is the same.
    state = {}
    evictor = ThreeParts(budget=20, decay=decay)
    for start, stop in ((0, 30), (30, 50)):
        evictor.observe(
            replace(
                ctx,
                state=state,
                query=ctx.query[:, :, start:stop],
                keys=ctx.keys[:, :, :stop],
                index=ctx.index[:, :, :stop],
                valid=None if ctx.valid is None else ctx.valid[:, :, :stop],
            )
        )
    assert torch.allclose(state["mass"][..., padding:], mass[..., padding:])


def parts_of(ctx, evictor, count):
    """The definition written again for row 0: slots' groups and kept slots, of each head."""
    length = ctx.step.lengths[0]
    first = ctx.keys.shape[2] - length
    tail = max(1, int(evictor.tail * count))
    slots = max(1, int(evictor.residual * (count - tail)))
    found = []
    for head in range(2):
        scores = naive_scores(ctx, evictor.decay, head).tolist()
        before = range(length - tail)
        top = sorted(before, key=lambda slot: -scores[slot])[: count - tail - slots]
        rest = [slot for slot in before if slot not in top and slot >= evictor.sinks]
        size, more = divmod(len(rest), slots)
        groups, start = [], 0
        for number in range(slots):
            stop = start + size + (number < more)
            groups.append([first + slot for slot in rest[start:stop]])
            start = stop
        own = [max(group, key=lambda slot: scores[slot - first]) for group in groups]
        kept = sorted([*own, *(first + slot for slot in (*top, *range(length - tail, length)))])
        found.append((dict(zip(own, groups, strict=True)), kept))
    return found


@pytest.mark.parametrize("padding", [0, 9])
def test_a_prompt_leaves_slots_of_equal_groups(padding):
    evictor = ThreeParts(budget=20, residual=0.3, sinks=0, decay=0.95)
    ctx = drawn((padding,), size=50)
    found = ZeroMerge(base=evictor, sinks=0).select(ctx, (20,))
    for head, (groups, kept) in enumerate(parts_of(ctx, evictor, 20)):
        assert found.indices[0, head].tolist() == kept
        for place, slot in enumerate(kept):
            members = groups.get(slot, [slot])
            assert float(found.log_weight[0, head, place].exp()) == pytest.approx(len(members))
            assert torch.allclose(found.keys[0, head, place], ctx.keys[0, head, members].mean(0))
            assert torch.allclose(found.values[0, head, place], ctx.values[0, head, members].mean(0))
        assert sorted(ctx.state["slots"][0, head].tolist()) == sorted(groups)
    assert "groups" not in ctx.state


def later(ctx, found, keys, values, query):
    """The context of a generated token, after the selection of a prompt was stored."""
    index = torch.cat([ctx.index.gather(2, found.indices), torch.full_like(ctx.index[..., :1], 50)], 2)
    weights = torch.cat([found.log_weight, torch.zeros_like(found.log_weight[..., :1])], 2)
    return replace(
        ctx,
        step=Step(50, 1, "decode", True, 0, 0, (51,), (51,)),
        query=query,
        keys=torch.cat([found.keys, keys], 2),
        values=torch.cat([found.values, values], 2),
        index=index,
        valid=None,
        stored=(index.shape[2],),
        log_weight=weights,
    )


def test_a_later_entry_joins_the_nearest_slot_by_weights():
    evictor = ThreeParts(budget=20, residual=0.3, sinks=0)
    rule = ZeroMerge(base=evictor, sinks=0)
    ctx = drawn((0,), size=50)
    first = rule.select(ctx, (20,))
    new = torch.randn(3, 1, 4, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ctx = later(ctx, first, new[0, :, :2], new[1, :, :2], new[2])
    before = ctx.state["mass"].clone()
    rule.observe(ctx)
    assert torch.allclose(ctx.state["mass"].sum(-1), before.gather(2, first.indices).sum(-1) * 0.98 + 1)
    slots = is_slot(ctx)
    found = rule.select(ctx, (20,))
    for head in range(2):
        mass = ctx.state["mass"][0, head]
        free = [place for place in range(21 - 10) if not slots[0, head, place]]
        lost = min(free, key=lambda place: float(mass[place]))
        assert found.indices[0, head].tolist() == [place for place in range(21) if place != lost]
        products = ctx.keys[0, head] @ ctx.keys[0, head, lost]
        best = max(slots[0, head].nonzero()[:, 0].tolist(), key=lambda place: float(products[place]))
        weight = float(ctx.log_weight[0, head, best].exp())
        place = best - (best > lost)
        for part, stored in ((found.keys, ctx.keys), (found.values, ctx.values)):
            wanted = (weight * stored[0, head, best] + stored[0, head, lost]) / (weight + 1)
            assert torch.allclose(part[0, head, place], wanted, atol=1e-6)
        assert float(found.log_weight[0, head, place].exp()) == pytest.approx(weight + 1)
        others = [other for other in range(20) if other != place]
        kept = found.indices[0, head, others]
        assert torch.equal(found.values[0, head, others], ctx.values[0, head, kept])


def test_a_base_without_slots_merges_into_the_largest_product():
    ctx = entries([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0], [4.0, 0.0]], [[0.0], [1.0], [4.0], [8.0]])
    found = chosen(ZeroMerge(base=listed(0, 1), sinks=0), ctx)
    assert found.values[0, 0, :, 0].tolist() == pytest.approx([4.0, 2.5])
    assert found.log_weight[0, 0].tolist() == pytest.approx([math.log(2)] * 2)


def test_rows_get_slots_when_they_first_evict():
    torch.manual_seed(0)
    part = torch.randn(2, 2, 40, 8, dtype=torch.float64)
    evictor = kvsieve.plan("zeromerge", budget=30, residual=0.2, floor=0).evict
    ctx = context(torch.randn(2, 4, 40, 8, dtype=torch.float64), part, padding=[0, 15])
    evictor.observe(ctx)
    found = evictor.select(ctx, (30, 30))
    assert found.lengths == (30, 25)
    assert ctx.state["slots"][0].min() >= 0
    assert ctx.state["slots"][1].max() == -1
    assert torch.equal(found.log_weight[1], torch.zeros_like(found.log_weight[1]))


def test_refusals():
    for wrong in ({"tail": 1.0}, {"residual": -0.1}, {"decay": 1.5}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            kvsieve.plan("zeromerge", **wrong)
