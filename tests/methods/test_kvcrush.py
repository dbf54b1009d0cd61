"""KVCrush: which entries stay by their scores, which as representatives of the others."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import KVCrush, SnapKV
from kvsieve.methods.kvcrush import evenly
from layers import kept
from scored import F64, Given, given
from tiny import padded_prompt, tiny_model


def slow(scores, count, share, anchor, must=()):
    """Kept slots of each head; scores: [heads][tokens]."""
    tokens = range(len(scores[0]))
    free = [j for j in tokens if j not in must]
    order = [sorted(free, key=lambda j, head=head: (-head[j], j)) for head in scores]
    bits = [set(head[: len(free) // 2]) for head in order]
    distance = [sum((j in own) != bit for own, bit in zip(bits, anchor, strict=True)) for j in tokens]
    picks = int((count - len(must)) * share)
    out = []
    for head in order:
        first = head[: count - len(must) - picks]
        others = sorted(set(free) - set(first), key=lambda j: (distance[j], j))
        if picks >= len(others):
            spaced = others
        else:
            spaced = [others[i * (len(others) - 1) // max(picks - 1, 1)] for i in range(picks)]
        out.append(sorted([*must, *first, *spaced]))
    return out


def test_by_hand():
    # The better halves: {0, 1, 2} and {0, 3, 4}. Distances to (0, 1): 0 has bits 11, 1 and 2 have 10, 3 and 4 have 01,
    # 5 has 00: 1, 2, 2, 0, 0, 1.
    ctx = given([[[9.0, 8, 7, 1, 2, 3], [9.0, 1, 2, 8, 7, 3]]])
    # Two by scores; the others of the first head are 2 3 4 5, ordered 3 4 5 2; the nearest and the farthest of them.
    assert kept(KVCrush(base=Given(budget=4), representatives=0.5), ctx) == [[0, 1, 2, 3], [0, 2, 3, 4]]
    # One representative is the nearest.
    assert kept(KVCrush(base=Given(budget=3), representatives=0.34), ctx)[0] == [0, 1, 3]
    # With the anchor (1, 1) distances are 0 1 1 1 1 2.
    assert kept(KVCrush(base=Given(budget=4), representatives=0.5, anchor="ones"), ctx)[0] == [0, 1, 2, 5]
    # A share too small for one keeps the best by scores.
    assert kept(KVCrush(base=Given(budget=4), representatives=0.01), ctx)[0] == [0, 1, 2, 5]


def test_entries_of_the_base_come_on_top():
    inf = math.inf
    ctx = given([[[1.0, 5, 2, 4, 3, 0, inf, inf]]])
    # Two are protected; four are divided into two and two: 1 and 3, then of 0 2 4 5, with bits 0 0 1 0, the ends.
    found = kept(KVCrush(base=Given(budget=6), representatives=0.5, anchor="zeros"), ctx)
    assert found == [[0, 1, 3, 4, 6, 7]]


@pytest.mark.parametrize("anchor", ["alternating", "random", "zeros", "ones"])
@pytest.mark.parametrize("share", [0.001, 0.25, 0.7, 1.0])
def test_it_equals_the_slow_reference_in_padded_batches(anchor, share):
    scores = torch.randn(2, 3, 61, dtype=F64, generator=torch.Generator().manual_seed(1))
    drawn = {"seed": 3} if anchor == "random" else {}
    crush = KVCrush(base=Given(budget="37%"), representatives=share, anchor=anchor, **drawn)
    bits = crush.anchor_bits(3).tolist()
    ctx = given(scores, padding=[0, 17])
    for row, pad in enumerate([0, 17]):
        wanted = slow(scores[row, :, pad:].tolist(), int(0.37 * (61 - pad)), share, bits)
        assert kept(crush, ctx, row) == [[pad + j for j in head] for head in wanted]


def test_heads_that_store_different_tokens_are_compared_by_token():
    # The heads store tokens 0 1 2 and 0 2 3; their better ones are 2 and 3.
    ctx = given([[[1.0, 2, 3], [1.0, 2, 3]]])
    ctx.index = torch.tensor([[[0, 1, 2], [0, 2, 3]]], dtype=torch.int32)
    ctx.step = dataclasses.replace(ctx.step, num_new=4)
    crush = KVCrush(base=Given(budget=2), anchor="zeros")
    bits = torch.tensor([[[False, False, True], [False, False, True]]])
    assert crush.distance(ctx, bits).tolist() == [[[0, 0, 1], [0, 1, 1]]]


@pytest.mark.parametrize("number", range(1, 9))
def test_places_are_evenly_spaced(number):
    place = torch.arange(10)[None, None]
    for picks in range(10):
        found = evenly(place, torch.tensor([[[number]]]), torch.tensor([[[picks]]]))[0, 0].nonzero()[:, 0].tolist()
        wanted = {i * (number - 1) // max(picks - 1, 1) for i in range(picks)}
        assert found == (sorted(wanted) if picks < number else list(range(number)))


def test_wrong_parameters_are_refused():
    with pytest.raises(PlanError, match=r"representatives must be a share in \[0, 1\], got 1.5"):
        KVCrush(base=Given(budget=4), representatives=1.5)
    with pytest.raises(PlanError, match="anchor"):
        kvsieve.plan("kvcrush", anchor="mean")
    with pytest.raises(PlanError, match="seed must be a whole number"):
        KVCrush(base=Given(budget=4), seed=-1)


def test_a_model_keeps_the_budget_and_padded_rows_equal_rows_alone():
    ids, mask = padded_prompt(50, 9)
    plan = kvsieve.Plan(evict=KVCrush(base=SnapKV(budget="40%", window=4, kernel=3)))
    with kvsieve.attach(tiny_model(), plan) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
        assert alone.entries() == [16] * 4
        for both, one in zip(together.layers, alone.layers, strict=True):
            assert (both.store.index[1:, :, -16:] - 9).tolist() == one.store.index.tolist()
