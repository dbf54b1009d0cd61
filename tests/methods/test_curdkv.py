"""CurDKV: by hand, against a slow definition in padded batches, and on a model."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.core.rotation import sketch
from kvsieve.errors import PlanError
from kvsieve.methods import CurDKV
from layers import context, kept
from tiny import greedy, padded_prompt, tiny_model

F64 = torch.float64
PADDING = [0, 13]


def test_by_hand():
    # Squared norms 1, 4, 9, 1 | 1, 1 of keys, in blocks of four: 1/15, 4/15, 9/15, 1/15 | 1/2, 1/2.
    keys = torch.tensor([1.0, 2, 3, 1, 1, 1], dtype=F64)[None, None, :, None]
    # 4, 4, 1, 1 | 9, 1 of values: 4/10, 4/10, 1/10, 1/10 | 9/10, 1/10.
    values = torch.tensor([2.0, 2, 1, 1, 3, 1], dtype=F64)[None, None, :, None]
    ctx = context(keys, keys, values=values)
    products = torch.tensor([4 / 150, 16 / 150, 9 / 150, 1 / 150, 9 / 20, 1 / 20], dtype=F64)
    evictor = CurDKV(budget=2, local=4, sinks=0)
    torch.testing.assert_close(evictor.scores(ctx)[0, 0], products / products.sum())
    assert kept(evictor, ctx) == [[1, 4]]
    assert kept(CurDKV(budget=2, local=4, sinks=1), ctx) == [[0, 4]]
    assert kept(CurDKV(budget=2, local=4, sinks=0, kind="key"), ctx) == [[2, 4]]
    assert kept(CurDKV(budget=2, local=4, sinks=0, kind="value"), ctx) == [[0, 4]]
    # Without blocks the norms themselves: 4, 16, 9, 1, 9, 1.
    assert kept(CurDKV(budget=3, local=0, sinks=0), ctx) == [[1, 2, 4]]
    # Means: 7/30, 10/30, 10.5/30, 2.5/30, 21/30, 9/30.
    assert kept(CurDKV(budget=3, local=4, sinks=0, kind="mean"), ctx) == [[1, 2, 4]]


def shares(norms, local):
    out = []
    for start in range(0, len(norms), local):
        part = norms[start : start + local]
        out += [norm / sum(part) for norm in part]
    return out


@pytest.mark.parametrize("projection", [0, 5])
@pytest.mark.parametrize("local", [1, 7, 16, 100])
def test_equals_the_slow_definition_in_padded_batches(projection, local):
    made = torch.Generator().manual_seed(local)
    keys, values = (torch.randn(2, 3, 40, size, dtype=F64, generator=made) for size in (8, 6))
    evictor = CurDKV(budget="40%", local=local, projection=projection, sinks=2)
    scores = evictor.scores(context(keys, keys, values=values, padding=PADDING))
    for row, pad in enumerate(PADDING):
        for head in range(3):
            both = []
            for part in (keys[row, head, pad:], values[row, head, pad:]):
                if projection:
                    part = part @ sketch(part.shape[1], projection, part.device).double()
                both.append(shares([(x @ x).item() for x in part], local))
            products = [k * v for k, v in zip(*both, strict=True)]
            wanted = torch.tensor([float("inf")] * 2 + [p / sum(products) for p in products[2:]], dtype=F64)
            torch.testing.assert_close(scores[row, head, pad:], wanted)


def test_padding_and_zero_vectors_have_scores():
    keys = torch.zeros(2, 1, 20, 4)
    scores = CurDKV(budget=9).scores(context(keys, keys, padding=PADDING))
    assert not scores.isnan().any()


def test_a_padded_row_keeps_as_the_row_alone():
    ids, mask = padded_prompt(48, 7)
    with kvsieve.attach(tiny_model(), kvsieve.plan("curdkv", budget=20, local=5)) as sieve:
        both = sieve.generate(ids, mask, **greedy(max_new_tokens=8))
        alone = sieve.generate(ids[1:, 7:], **greedy(max_new_tokens=8))
    assert torch.equal(both.sequences[1, 48:], alone.sequences[0, 41:])
    assert both.stats.kv_entries == [20] * 4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"kind": "both"}, "kind"),
        ({"local": -1}, "local"),
        ({"projection": -1}, "projection"),
        ({"budget": 4}, "sinks"),
    ],
)
def test_bad_parameters_are_named(given, match):
    with pytest.raises(PlanError, match=match):
        CurDKV(**{"budget": 9, **given})
