"""KVMerger: runs of similar neighbours, their pivots, and Gaussian weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.core.runs import claimed
from kvsieve.errors import PlanError
from kvsieve.methods import KVMerger
from kvsieve.methods.kvmerger import MergingSets
from merging import chosen, drawn, entries, listed

NONE = float("-inf")


def test_entries_go_to_the_kept_one_on_their_side_of_the_weakest_link():
    link = torch.tensor([[[NONE, 0.9, 0.8, 0.2, 0.9, 0.7, 0.9, 0.9, 0.9]]])
    stays = torch.tensor([[[0, 1, 0, 0, 0, 1, 0, 0, 0]]]).bool()
    #       slot 0 -> 1; 2 -> 1 and 3, 4 -> 5 (cut at link 3); 6, 7, 8 -> 5.
    assert claimed(link, stays, -1.0).tolist() == [[[1, -1, 1, 5, 5, -1, 5, 5, 5]]]
    # No link below 0.75 is crossed: 3 and 4 reach 5 over 0.7.
    assert claimed(link, stays, 0.75).tolist() == [[[1, -1, 1, -1, -1, -1, 5, 5, 5]]]
    # Links of entries that take no part.
    link[..., 7] = NONE
    assert claimed(link, stays, -1.0).tolist() == [[[1, -1, 1, 5, 5, -1, 5, -1, -1]]]
    assert claimed(link, torch.zeros_like(stays), -1.0).tolist() == [[[-1] * 9]]


def test_gaussian_weights_by_hand():
    keys = [[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [0.0, 5.0]]
    rule = KVMerger(base=listed(1, 3), sinks=0)
    found = chosen(rule, entries(keys, [[1.0], [2.0], [3.0], [9.0]]))
    # Distances 0.1 and 0.2 from the pivot, slot 1; sigma is 0.15.
    weights = [math.exp(-0.5 * (distance / 0.15) ** 2) for distance in (0.1, 0.0, 0.2)]
    total = sum(weights)
    value = (weights[0] * 1 + weights[1] * 2 + weights[2] * 3) / total
    key = (weights[1] * 0.1 + weights[2] * 0.3) / total
    assert found.values[0, 0, :, 0].tolist() == pytest.approx([value, 9.0])
    assert found.keys[0, 0].flatten().tolist() == pytest.approx([1.0, key, 0.0, 5.0])
    assert found.log_weight is None
    # Equal keys: plain means.
    found = chosen(rule, entries([*[[1.0, 0.0]] * 3, [0.0, 5.0]], [[1.0], [2.0], [3.0], [4.0]]))
    assert found.values[0, 0, :, 0].tolist() == pytest.approx([2.0, 4.0])


def sets_of(ctx, evictor, count):
    """The definition written again for row 0: kept slots of each head, and the members of each kept slot."""
    found = []
    size = ctx.keys.shape[2]
    first = size - ctx.step.lengths[0]
    for head in range(2):
        query = ctx.query[0, 2 * head : 2 * head + 2, first:]
        keys = ctx.keys[0, head, first:]
        length = len(keys)
        logits = (query @ keys.T) * ctx.scale
        logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), NONE)
        mass = logits.softmax(-1).sum(1).mean(0).tolist()
        room = count - evictor.sinks
        must = {*range(evictor.sinks), *range(length - max(int(evictor.recent * room), 1), length)}
        free = sorted((slot for slot in range(length) if slot not in must), key=lambda slot: -mass[slot])
        alone = must | set(free[: int(evictor.heavy * room)])
        link = {
            slot: float(torch.cosine_similarity(keys[slot], keys[slot - 1], dim=0))
            for slot in range(1, length)
            if slot not in alone and slot - 1 not in alone
        }
        joined = set(sorted(link, key=lambda slot: -link[slot])[: length - count])
        groups = []
        for slot in range(length):
            if slot in joined:
                groups[-1].append(slot)
            else:
                groups.append([slot])
        pivots = {first + max(group, key=lambda slot: mass[slot]): [first + slot for slot in group] for group in groups}
        found.append(pivots)
    return found


@pytest.mark.parametrize("padding", [0, 13])
def test_the_budget_is_the_number_of_sets(padding):
    ctx = drawn((padding,), size=60)
    count = 44 - padding
    evictor = MergingSets(budget=count, sinks=2)
    found = KVMerger(base=evictor, sinks=2, threshold=-1.0).select(ctx, (count,))
    for head, pivots in enumerate(sets_of(ctx, evictor, count)):
        slots = found.indices[0, head].tolist()
        assert slots == sorted(pivots)
        for place, pivot in enumerate(slots):
            members = ctx.keys[0, head, pivots[pivot]]
            distance = (members - ctx.keys[0, head, pivot]).norm(dim=-1)
            sigma = distance.sum() / max(len(members) - 1, 1)
            weight = torch.exp(-0.5 * (distance / sigma.clamp_min(1e-12)) ** 2)
            for part, theirs in ((found.keys, ctx.keys), (found.values, ctx.values)):
                mean = (weight[:, None] * theirs[0, head, pivots[pivot]]).sum(0) / weight.sum()
                assert torch.allclose(part[0, head, place], mean)


def test_protected_entries_stay_alone():
    fixed = torch.zeros(1, 2, 60, dtype=torch.bool)
    fixed[..., 20:24] = True
    ctx = replace(drawn((0,)), protected=fixed)
    found = chosen(kvsieve.plan("kvmerger", budget=40, floor=0).evict, ctx)
    for head in range(2):
        slots = found.indices[0, head].tolist()
        for slot in range(20, 24):
            assert torch.equal(found.values[0, head, slots.index(slot)], ctx.values[0, head, slot])


def test_refusals():
    with pytest.raises(PlanError, match="sum of at most 1"):
        MergingSets(budget=0.5, recent=0.8, heavy=0.3)
    with pytest.raises(PlanError, match="a recent entry and a pivot"):
        kvsieve.plan("kvmerger", budget=5)
