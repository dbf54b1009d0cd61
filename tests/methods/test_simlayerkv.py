"""SimLayerKV: which layers are lazy, and what they keep."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import SimLayerKV
from layers import context, kept
from tiny import padded_prompt, tiny_model, tiny_prompt

F64 = torch.float64


def layer(weights, **options):
    """A layer of one head whose last query gives these weights to its entries."""
    logits = torch.tensor(weights, dtype=F64).log()
    keys = logits[None, None, :, None].clone()
    query = torch.ones(1, 1, len(weights), 1, dtype=F64)
    return context(query, keys, scale=1.0, **options)


def test_by_hand():
    # Of 8 entries a lazy layer keeps the first and the last three, with 0.1 + 0.1 + 0.3 + 0.2 of the attention.
    weights = [0.1, 0.05, 0.05, 0.15, 0.05, 0.1, 0.3, 0.2]
    assert kept(SimLayerKV(budget=4, sinks=1, threshold=0.69), layer(weights)) == [[0, 5, 6, 7]]
    lazy = SimLayerKV(budget=4, sinks=1, threshold=0.71)
    assert lazy.select(layer(weights), (4,)) is None
    # More entries hold more of it.
    assert kept(SimLayerKV(budget=6, sinks=1, threshold=0.71), layer(weights)) == [[0, 3, 4, 5, 6, 7]]


def test_queries_and_heads_are_averaged():
    keys = torch.zeros(1, 1, 8, 1, dtype=F64)
    keys[0, 0, 3] = 100.0
    query = torch.zeros(1, 2, 8, 1, dtype=F64)
    query[0, 0, -2:] = 1.0
    # The first head looks at entry 3 alone; the second one evenly, at 4 of 7 and 4 of 8 kept entries.
    ctx = context(query, keys, scale=1.0)
    share = SimLayerKV(budget=4, sinks=1, observed=2).attended(ctx, (4,))
    assert share.tolist() == pytest.approx([(0 + 0 + 3 / 7 + 4 / 8) / 4])
    assert SimLayerKV(budget=4, sinks=1, observed=1).attended(ctx, (4,)).tolist() == pytest.approx([0.25])


def test_rows_are_lazy_alone():
    make = torch.Generator().manual_seed(0)
    query, keys = (3 * torch.randn(2, heads, 40, 4, dtype=F64, generator=make) for heads in (4, 2))
    both = context(query, keys, padding=[0, 13])
    one = context(query[1:, :, 13:], keys[1:, :, 13:])
    evictor = SimLayerKV(budget="30%", observed=3)
    shares = evictor.attended(both, (12, 8))
    assert shares[1].item() == pytest.approx(evictor.attended(one, (8,)).item())
    middle = shares.mean().item()
    found = SimLayerKV(budget="30%", observed=3, threshold=middle).select(both, (12, 8))
    lazy = [share > middle for share in shares.tolist()]
    assert found.lengths == (12 if lazy[0] else 40, 8 if lazy[1] else 27)


def test_lazy_layers_keep_little_and_the_others_all():
    ids = tiny_prompt(size=50)
    ask = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model = tiny_model()
    shares = {}

    class Seeing(SimLayerKV):
        def attended(self, ctx, counts):
            shares[ctx.layer_idx] = super().attended(ctx, counts).item()
            return torch.tensor([shares[ctx.layer_idx]])

    with kvsieve.attach(model, kvsieve.Plan(evict=Seeing(budget=14))) as sieve:
        sieve.prefill(ids)
    middle = sum(shares.values()) / 4
    with kvsieve.attach(model, kvsieve.plan("simlayerkv", budget=14, threshold=middle, every=1)) as sieve:
        result = sieve.generate(ids, **ask)
        parts = sieve.prefill(ids, chunk=7)
    lazy = [shares[index] > middle for index in range(4)]
    assert len(set(lazy)) == 2
    assert parts.entries() == [14 if drops else 50 for drops in lazy]
    # A lazy layer rolls while decoding; the last token is not fed.
    assert result.cache.entries() == [14 if drops else 61 for drops in lazy]


def test_padded_rows_equal_rows_alone():
    ids, mask = padded_prompt(50, 9)
    with kvsieve.attach(tiny_model(), kvsieve.plan("simlayerkv", budget="40%", threshold=0)) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
    for both, one in zip(together.layers, alone.layers, strict=True):
        assert (both.store.index[1:, :, -16:] - 9).tolist() == one.store.index.tolist()


def test_wrong_parameters_are_refused():
    with pytest.raises(PlanError, match=r"threshold must be a share of attention in \[0, 1\], got 2"):
        SimLayerKV(budget=20, threshold=2.0)
    with pytest.raises(PlanError, match="observed must be a whole number of at least 1, got 0"):
        SimLayerKV(budget=20, observed=0)
