"""CriticalAdaKV: budgets of Ada-KV, entries of CriticalKV: by hand, against a slow definition, and on a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.methods import AdaKV
from kvsieve.methods.base import ScoredEvictor
from layers import context
from rotating import Rotating
from tiny import greedy, padded_prompt, tiny_model

F64 = torch.float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(ScoredEvictor, heads="own", query_aware=False):
    """Ranks by the scores that the test put into ``ctx.shared``."""

    def scores(self, ctx):
        return ctx.shared["scores"]


def chosen(evictor, scores, values, weight, padding=None):
    """[rows][heads] slots that stay."""
    ctx = context(values, values, values=values, padding=padding, shared={"scores": scores})
    ctx = dataclasses.replace(ctx, model=Rotating(weight=weight))
    counts = tuple(evictor.entries(length) for length in ctx.step.lengths)
    selection = evictor.select(ctx, counts)
    sizes = selection.head_lengths
    if sizes is None:
        sizes = [[length] * scores.shape[1] for length in selection.lengths or (selection.indices.shape[-1],)]
    return [
        [selection.indices[row, head, -size:].tolist() for head, size in enumerate(heads)]
        for row, heads in enumerate(sizes)
    ]


def test_by_hand():
    scores = torch.tensor([[[9, 8, 6, 5, 0.1, 0.2], [7, 1, 0.3, 0.4, 0.5, 0.6]]], dtype=F64)
    values = torch.ones(1, 2, 6, 1, dtype=F64)
    values[0, 0, 4] = 100
    values[0, 1, 3] = -50
    given = {"base": Given(budget=3), "alpha": 0, "normalize": False}
    # The six best of both heads are four of the first and two of the second.
    weight = torch.ones(2, 1, 1, dtype=F64)
    assert chosen(AdaKV(**given), scores, values, weight) == [[[0, 1, 2, 3], [0, 1]]]
    # Half of each by score; the rest by 6, 5, 10, 0.2 and by 1, 0.3, 20, 0.5, 0.6.
    assert chosen(AdaKV(critical=True, **given), scores, values, weight) == [[[0, 1, 2, 4], [0, 3]]]


def best(scores, count):
    return sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:count]


@pytest.mark.parametrize("groups", [1, 3])
def test_equals_the_slow_definition_in_padded_batches(groups):
    made = torch.Generator().manual_seed(groups)
    scores = torch.rand(2, 3, 40, dtype=F64, generator=made)
    values = torch.randn(2, 3, 40, 5, dtype=F64, generator=made)
    weight = torch.randn(3 * groups, 5, 7, dtype=F64, generator=made)
    padding = [0, 11]
    evictor = AdaKV(base=Given(budget="30%"), alpha=0.2, rule="kvpress", critical=True)
    # As many query heads as the projection has.
    ctx = context(values.repeat_interleave(groups, 1), values, values=values, padding=padding)
    ctx = dataclasses.replace(ctx, shared={"scores": scores}, model=Rotating(weight=weight))
    selection = evictor.select(ctx, tuple(evictor.entries(length) for length in ctx.step.lengths))
    for row, pad in enumerate(padding):
        own = scores[row, :, pad:].tolist()
        length = 40 - pad
        count = int(0.3 * length)
        safe = [set(best(head, int(count * 0.2))) for head in own]
        order = sorted(
            ((at not in safe[head], -own[head][at], head, at) for head in range(3) for at in range(length)),
        )[: 3 * count]
        budgets = [sum(entry[2] == head for entry in order) for head in range(3)]
        for head, budget in enumerate(budgets):
            first = set(best(own[head], budget // 2))
            norms = [
                sum((value @ weight[head * groups + g]).abs().sum().item() for g in range(groups)) / groups
                for value in values[row, head, pad:]
            ]
            second = [-1.0 if at in first else (own[head][at] + 1e-4) * norms[at] for at in range(length)]
            wanted = sorted([*first, *best(second, budget - len(first))])
            assert selection.head_lengths[row][head] == budget
            assert selection.indices[row, head, -budget:].tolist() == [pad + at for at in wanted]


def test_on_a_model_heads_get_as_much_as_under_adakv():
    ids, mask = padded_prompt(48, 7)
    options = {"budget": 20, "window": 4, "kernel": 3, "every": 4}
    plans = [kvsieve.plan(name, **options) for name in ("adakv", "criticaladakv")]
    assert plans[1].evict == dataclasses.replace(plans[0].evict, critical=True)
    assert plans[1].evict.traits.needs == ("output_weight",) and plans[0].evict.traits.needs == ()
    stores = []
    for plan in plans:
        with kvsieve.attach(tiny_model(), plan) as sieve:
            stores.append([layer.store for layer in sieve.prefill(ids, mask).sieve_layers.values()])
            both = sieve.generate(ids, mask, **greedy(max_new_tokens=9))
            alone = sieve.generate(ids[1:, 7:], **greedy(max_new_tokens=9))
        assert torch.equal(both.sequences[1, 48:], alone.sequences[0, 41:])
    # Layers after the first see what it kept.
    counts = [part[0].valid.sum(-1).tolist() for part in stores]
    assert counts[0] == counts[1]
    real = [part[0].index.masked_fill(~part[0].valid, -1).sort(-1).values for part in stores]
    assert any(set(a.tolist()) != set(b.tolist()) for a, b in zip(real[0][0], real[1][0], strict=True))
