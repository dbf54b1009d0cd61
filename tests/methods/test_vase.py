"""VaSE and MorphKV: scores by the definitions, written a second time."""

from __future__ import annotations

import math

import pytest
import torch

import kvsieve
from kvsieve.core.draws import drawn
from kvsieve.errors import PlanError
from kvsieve.methods import MorphKV, VaSE
from kvsieve.methods.base import positions
from layers import context, kept


def tensors(groups, length=40, seed=0):
    make = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 2 * groups, length, 8, generator=make, dtype=torch.float64)
    keys, values = (torch.randn(2, 2, length, 8, generator=make, dtype=torch.float64) for _ in range(2))
    return query, keys, values


@pytest.mark.parametrize("groups", [1, 3])
def test_vase_equals_the_slow_reference(groups):
    window, large, budget, padding = 5, 6, 20, [0, 9]
    query, keys, values = tensors(groups)
    ctx = context(query, keys, values=values, padding=padding)
    noise = drawn(ctx, positions(ctx), 3)
    evictor = VaSE(budget=budget, window=window, large=large, seed=3)
    for row, pad in enumerate(padding):
        for head, ours in enumerate(kept(evictor, ctx, row)):
            older = list(range(pad, 40 - window))
            reach = {j: float(values[row, head, j].max() - values[row, head, j].min()) for j in older}
            order = sorted(older, key=lambda j: (j >= pad + 4, -reach[j] if j >= pad + 4 else j))
            biggest = order[:large]
            mass = torch.zeros(groups, len(older), dtype=torch.float64)
            for member in range(groups):
                for late in range(40 - window, 40):
                    logits = keys[row, head, older] @ query[row, head * groups + member, late] * 8**-0.5
                    mass[member] += logits.softmax(0)
            wide = torch.nn.functional.pad(mass, (2, 2)).unfold(-1, 5, 1).mean(-1).mean(0)
            rank = {
                j: math.log(float(wide[at])) - math.log(-math.log(float(noise[row, head, j])))
                for at, j in enumerate(older)
                if j not in biggest
            }
            sampled = sorted(rank, key=lambda j: -rank[j])[: budget - window - large]
            assert ours == sorted([*biggest, *sampled, *range(40 - window, 40)])


def test_vase_samples_in_proportion_to_attention(monkeypatch):
    """One place for two entries, of which every query gives the first three times as much."""
    monkeypatch.setattr("kvsieve.methods.vase._KERNEL", 1)
    keys = torch.zeros(1, 1, 4, 2)
    keys[0, 0, 0, 0] = math.log(3.0)
    query = torch.ones(1, 1, 4, 2)
    ctx = context(query, keys, scale=1.0)
    wins = 0
    for seed in range(400):
        scores = VaSE(budget=3, window=2, large=0, seed=seed).scores(ctx)[0, 0]
        wins += bool(scores[0] > scores[1])
    # A deviation of 9.
    assert abs(wins - 300) < 40


@pytest.mark.parametrize("fusion", ["sum", "max"])
@pytest.mark.parametrize("groups", [1, 3])
def test_morphkv_equals_the_slow_reference(groups, fusion):
    window, budget, padding = 5, 14, [0, 9]
    query, keys, _ = tensors(groups, seed=1)
    ctx = context(query, keys, padding=padding)
    for row, pad in enumerate(padding):
        for head, ours in enumerate(kept(MorphKV(budget=budget, window=window, fusion=fusion), ctx, row)):
            older = list(range(pad, 40 - window))
            rows = []
            for late in range(40 - window, 40):
                logits = sum(
                    keys[row, head, older] @ query[row, head * groups + member, late] * 8**-0.5
                    for member in range(groups)
                )
                rows.append(logits.softmax(0))
            fused = torch.stack(rows).sum(0) if fusion == "sum" else torch.stack(rows).amax(0)
            best = sorted(range(len(older)), key=lambda at: -float(fused[at]))[: budget - window]
            assert ours == sorted([*(older[at] for at in best), *range(40 - window, 40)])


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("vase", {"window": 0}),
        ("vase", {"large": -1}),
        ("vase", {"budget": 328}),
        ("morphkv", {"window": 0}),
        ("morphkv", {"fusion": "mean"}),
        ("morphkv", {"budget": 32}),
    ],
)
def test_bad_parameters_are_refused(name, given):
    with pytest.raises(PlanError):
        kvsieve.plan(name, **given)
