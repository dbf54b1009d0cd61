"""DefensiveKV: risks, first stage and budgets over heads and layers: by hand, against loops, and on a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import DefensiveKV, DefensiveScores
from layers import context
from rotating import Rotating
from scored import Given, columns, given, kept_slots
from tiny import greedy, padded_prompt, tiny_model

F64 = torch.float64
INF = float("inf")


def layer(query, keys, values, weight, padding=None):
    ctx = context(query, keys, values=values, padding=padding)
    return dataclasses.replace(ctx, model=Rotating(weight=weight))


def test_scores_by_hand():
    """One head without pooling, a window of two, and keys that are logarithms of the attention weights."""
    weights = torch.tensor([[0.375, 0.5, 0.025, 0.1, 1], [0.4, 0.1, 0.1, 0.1, 0.3]], dtype=F64)
    query = torch.zeros(1, 1, 5, 2, dtype=F64)
    query[0, 0, 3:] = torch.eye(2, dtype=F64)
    values = torch.tensor([1.0, 1, -4, 1, 1], dtype=F64).view(1, 1, 5, 1)
    ctx = layer(query, weights.log().T[None, None], values, torch.ones(1, 1, 1, dtype=F64))
    ctx = dataclasses.replace(ctx, scale=1.0)
    # Risks 0.4, 0.5 and 0.1, of mean 1/3; a single head has all of the norms. Mean attention 0.3875, 0.3 and 0.0625,
    # of which 0.3625 goes to the two entries before the window; the largest is 0.517 of its sum.
    for mass, wanted in ((0.8, [0.4, 0.5, 1 / 3]), (0.9, [0.5, 0.5, 1 / 3])):
        scores = DefensiveScores(budget=100, window=2, kernel=1, mass=mass).scores(ctx)
        torch.testing.assert_close(scores, torch.tensor([[[*wanted, INF, INF]]], dtype=F64))


def slow(query, keys, values, weight, scale, evictor):
    """[H][N - W] scores of one row, by loops over the definition, and its first stages' sizes."""
    window, kernel = evictor.window, evictor.kernel
    heads, n = keys.shape[:2]
    groups = len(query) // heads
    before = n - window
    risks, means, nearby = [], [], 0.0
    for head in range(heads):
        risk, mean = [0.0] * before, [0.0] * before
        for member in range(groups):
            for at in range(before, n):
                row = (keys[head, : at + 1] @ query[head * groups + member, at] * scale).softmax(0)[:before].tolist()
                half = kernel // 2
                pooled = [sum(row[max(i - half, 0) : i + half + 1]) / kernel for i in range(before)]
                pooled = [part * sum(row) / sum(pooled) for part in pooled]
                risk = list(map(max, risk, pooled))
                mean = [old + new / groups / window for old, new in zip(mean, row, strict=True)]
        risks.append(risk)
        means.append(mean)
        nearby += sum(mean[before - window :]) / heads
    norms = [
        [sum((values[h, i] @ weight[h * groups + g]).abs().sum().item() for g in range(groups)) for i in range(before)]
        for h in range(heads)
    ]
    scores = [
        [
            max(risks[h][i], sum(risks[h]) / before) * norms[h][i] / sum(norms[other][i] for other in range(heads))
            for i in range(before)
        ]
        for h in range(heads)
    ]
    best = max(map(max, scores))
    room = evictor.budget.entries(n) * before // n - window
    sizes = []
    for head, mean in enumerate(means):
        seen = 0.0
        order = sorted(range(before), key=lambda i, mean=mean: (-mean[i], i))
        first = []
        for i in order:
            seen += mean[i] / sum(mean)
            if seen >= evictor.mass - nearby or len(first) >= room:
                break
            first.append(i)
        sizes.append(len(first))
        for i in first:
            scores[head][i] = best
    return scores, sizes


@pytest.mark.parametrize(
    ("groups", "budget", "mass"), [(1, "60%", 0.8), (3, "60%", 0.6), (2, "30%", 0.9), (2, 20, 0.0)]
)
def test_equals_the_slow_definition_in_padded_batches(groups, budget, mass):
    made = torch.Generator().manual_seed(groups)
    query, keys = (2 * torch.randn(2, heads, 40, 6, dtype=F64, generator=made) for heads in (2 * groups, 2))
    values = torch.randn(2, 2, 40, 5, dtype=F64, generator=made)
    weight = torch.randn(2 * groups, 5, 7, dtype=F64, generator=made)
    padding = [0, 11]
    base = DefensiveScores(budget=budget, window=4, mass=mass)
    ctx = layer(query, keys, values, weight, padding)
    scores = base.scores(ctx)
    counts = tuple(base.entries(length) for length in ctx.step.lengths)
    kept = DefensiveKV(base=base).select(ctx, counts)[0]
    for row, pad in enumerate(padding):
        own = [part[row, :, pad:] for part in (query, keys, values)]
        wanted, sizes = slow(*own, weight, ctx.scale, base)
        torch.testing.assert_close(scores[row, :, pad:-4], torch.tensor(wanted, dtype=F64))
        assert bool((scores[row, :, -4:] == INF).all())
        assert (max(sizes) > 0) == (mass > 0)
        # The window, and the best of both heads together.
        entries = [(-wanted[head][i], head, i) for head in range(2) for i in range(36 - pad)]
        best = sorted(entries)[: 2 * (counts[row] - 4)]
        assert kept_slots(kept, row) == [
            sorted(pad + i for _, h, i in best if h == head) + list(range(36, 40)) for head in range(2)
        ]


def cascade(evictor, scores, count):
    """The kept slots [layers][heads] of one row of layers with scores [layers][H][N], and heads' budgets later."""
    shared, found, states = {}, [[list(range(len(head))) for head in one] for one in scores], []
    for at, one in enumerate(scores):
        ctx = given([one], layer_idx=at, num_layers=len(scores))
        states.append(ctx.state)
        shared["scores"] = ctx.shared["scores"]
        chosen = evictor.select(dataclasses.replace(ctx, shared=shared), (count,))
        assert chosen is None or at == len(scores) - 1 or not evictor.across_layers
        for index, selection in (chosen or {}).items():
            found[index] = kept_slots(selection)
    return found, [state["heads"].tolist() for state in states]


def test_heads_and_layers_share_the_budget_by_hand():
    scores = [[[9.0, 1, 8, INF], [0, 2, 0, INF]], [[5.0, 6, 7, INF], [4, 3, 2, INF]]]
    # Per layer four entries: the two that must stay and the two best.
    one = cascade(DefensiveKV(base=Given(budget=2)), scores, 2)
    assert one == ([[[0, 2, 3], [3]], [[1, 2, 3], [3]]], [[[3, 1]], [[3, 1]]])
    # Twelve of all: beside the four that must stay 9, 8, 7, 6, 5, 4, 3 and the first 2.
    both = DefensiveKV(base=Given(budget=2), across_layers=True)
    assert cascade(both, scores, 3) == ([[[0, 2, 3], [1, 3]], [[0, 1, 2, 3], [0, 1, 3]]], [[[3, 2]], [[4, 3]]])
    # A prompt within the budget leaves the rest to generated tokens.
    assert cascade(both, scores, 5) == ([[[0, 1, 2, 3]] * 2] * 2, [[[5, 5]]] * 2)


@pytest.mark.parametrize("across", [False, True])
def test_on_a_model(across):
    """Chunks equal one shot, a padded row the row alone, and the total is met while decoding, too."""
    ids, mask = padded_prompt(48, 7)
    plan = kvsieve.plan("defensivekv", budget=20, window=4, kernel=3, every=4, across_layers=across)
    assert plan.evict.traits.recuts == across and plan.evict.traits.needs == ("output_weight",)
    with kvsieve.attach(tiny_model(), plan) as sieve:
        stores = [columns(sieve.prefill(ids, mask, chunk=chunk), 1) for chunk in (None, 13)]
        both = sieve.generate(ids, mask, **greedy(max_new_tokens=9))
        alone = sieve.prefill(ids[1:, 7:])
        answer = sieve.generate(ids[1:, 7:], **greedy(max_new_tokens=9))
    assert stores[0] == stores[1]
    assert columns(alone) == [[[at - 7 for at in head] for head in one] for one in stores[0]]
    assert torch.equal(both.sequences[1, 48:], answer.sequences[0, 41:])
    sizes = [list(map(len, one)) for one in stores[0]]
    heads = len(sizes[0])
    assert sum(map(sum, sizes)) == 20 * heads * len(sizes) and any(len(set(one)) > 1 for one in sizes)
    assert all(sum(one) == 20 * heads for one in sizes) != across
    after = [list(map(len, one)) for one in columns(answer.cache)]
    grown = [
        late - early
        for before, later in zip(sizes, after, strict=True)
        for early, late in zip(before, later, strict=True)
    ]
    assert set(grown) <= {0, 1, 2, 3}


def test_wrong_parameters_are_refused():
    with pytest.raises(PlanError, match=r"mass must be a share in \[0, 1\], got 1.5"):
        kvsieve.plan("defensivekv", mass=1.5)
    with pytest.raises(PlanError, match="across_layers must be True or False, got 1"):
        kvsieve.plan("defensivekv", across_layers=1)
    with pytest.raises(PlanError, match="at least 33 are needed"):
        kvsieve.plan("defensivekv", budget=32)
