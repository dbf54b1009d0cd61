"""CapKV: against a slow definition in padded batches, and on a model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import CapKV
from layers import context, kept
from rotating import Rotating
from tiny import greedy, padded_prompt, tiny_model

F64 = torch.float64
PADDING = [0, 13]


def slow(query, keys, values, tau, sinks, future):
    """[N] scores of one KV head after its sinks; query [G, N, D], keys and values of a row without padding."""
    facts, length = Rotating(), len(keys)
    total = torch.zeros(length - sinks, dtype=F64)
    for head in query:
        back = [facts.rotate(0, head[None, None, i : i + 1], torch.tensor([[i]]), inverse=True) for i in range(length)]
        mean = (sum(back[sinks:]) / (length - sinks)).flatten()
        places = range(length, length + future)
        anchor = sum(facts.rotate(0, mean[None, None, None], torch.tensor([[p]])).flatten() for p in places) / future
        similar = [(key @ anchor / (key.norm() * anchor.norm())).item() for key in keys[sinks:]]
        weights = [math.exp(tau * (s - max(similar))) for s in similar]
        capacity = torch.eye(values.shape[1], dtype=F64)
        for weight, value in zip(weights, values[sinks:], strict=True):
            capacity += (weight + 1e-6) * torch.outer(value, value)
        spans = [(value @ torch.linalg.solve(capacity, value)).item() for value in values[sinks:]]
        total += torch.tensor([w * s for w, s in zip(weights, spans, strict=True)], dtype=F64) / len(query)
    return total


@pytest.mark.parametrize("groups", [1, 3])
def test_equals_the_slow_definition_in_padded_batches(groups):
    made = torch.Generator().manual_seed(groups)
    shapes = (2, 2 * groups, 40, 8), (2, 2, 40, 8), (2, 2, 40, 6)
    query, keys, values = (torch.randn(shape, dtype=F64, generator=made) for shape in shapes)
    evictor = CapKV(budget=20, sinks=3, n_future=7, tau=2.5)
    ctx = dataclasses.replace(context(query, keys, values=values, padding=PADDING), model=Rotating())
    evictor.observe(ctx)
    scores = evictor.scores(ctx)
    for row, pad in enumerate(PADDING):
        for head in range(2):
            own = query[row, head * groups : (head + 1) * groups, pad:], keys[row, head, pad:], values[row, head, pad:]
            torch.testing.assert_close(scores[row, head, pad + 3 :], slow(*own, 2.5, 3, 7))
            assert bool(scores[row, head, pad : pad + 3].isposinf().all())


def test_a_value_that_others_span_counts_less():
    # Without weights (tau=0) the leverage of values alone: five equal ones share a direction, slot 6 has its own.
    values = torch.tensor([[1.0, 0]] * 6 + [[0, 1.0]], dtype=F64)[None, None]
    ctx = dataclasses.replace(context(values, values.clone(), values=values), model=Rotating())
    evictor = CapKV(budget=2, sinks=1, tau=0.0, n_future=1)
    evictor.observe(ctx)
    assert kept(evictor, ctx) == [[0, 6]]
    torch.testing.assert_close(
        evictor.scores(ctx)[0, 0, 1:], torch.tensor([1 / 6] * 5 + [1 / 2], dtype=F64), atol=1e-5, rtol=1e-5
    )


def test_a_row_within_its_sinks_is_no_error():
    query = torch.randn(2, 1, 9, 4, generator=torch.Generator().manual_seed(0))
    ctx = dataclasses.replace(context(query, query, padding=[0, 7]), model=Rotating())
    evictor = CapKV(budget=6)
    evictor.observe(ctx)
    assert not evictor.scores(ctx).isnan().any()


def test_a_padded_row_keeps_as_the_row_alone_and_chunks_change_nothing():
    ids, mask = padded_prompt(48, 7)
    with kvsieve.attach(tiny_model(), kvsieve.plan("capkv", budget=20)) as sieve:
        both = sieve.generate(ids, mask, **greedy(max_new_tokens=8))
        alone = sieve.generate(ids[1:, 7:], chunk=11, **greedy(max_new_tokens=8))
    assert torch.equal(both.sequences[1, 48:], alone.sequences[0, 41:])
    assert both.stats.kv_entries == [20] * 4


@pytest.mark.parametrize(
    ("given", "match"), [({"tau": -1.0}, "tau"), ({"tau": math.nan}, "tau"), ({"n_future": 0}, "n_future")]
)
def test_bad_parameters_are_named(given, match):
    with pytest.raises(PlanError, match=match):
        CapKV(budget=9, **given)
