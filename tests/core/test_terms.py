"""Weights of capped logits with sinks are those of the softmax that attention takes."""

from __future__ import annotations

import math

import pytest
import torch

from attend import AttentionTerms, asking, query_mass, window_mass, window_weights
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.core.page_weights import page_softmax
from kvsieve.core.scoring import pooled_mass
from kvsieve.core.softmax import softmax
from layers import context

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0], dtype=torch.float64)
EACH_TERM = {
    "softcap": AttentionTerms(softcap=0.7),
    "sinks": AttentionTerms(sinks=SINKS),
    "both": AttentionTerms(0.7, SINKS),
}

each_term = pytest.mark.parametrize("terms", EACH_TERM.values(), ids=EACH_TERM.keys())


def weights_of(logits, head, terms):
    """Softmax of a list of logits of one query head, number by number."""
    if terms.softcap is not None:
        logits = [terms.softcap * math.tanh(each / terms.softcap) for each in logits]
    powers = [math.exp(each) for each in logits]
    total = sum(powers) + (0 if terms.sinks is None else math.exp(terms.sinks[head]))
    return [each / total for each in powers]


@each_term
@pytest.mark.parametrize("block", [None, 7], ids=["whole", "blocked"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_window_mass(terms, block, padded):
    torch.manual_seed(1)
    query, keys = torch.randn(2, 6, 5, 8, dtype=torch.float64), torch.randn(2, 2, 23, 8, dtype=torch.float64)
    valid = None
    if padded:
        valid = torch.ones(2, 1, 23, dtype=torch.bool)
        valid[1, :, :9] = valid[0, :, 20] = False
    wanted = torch.zeros(2, 6, 5, 23, dtype=torch.float64)
    for row in range(2):
        for head in range(6):
            for at in range(5):
                own = 18 + at
                seen = [j for j in range(own + 1) if not padded or valid[row, 0, j]]
                if padded and not valid[row, 0, own]:
                    continue
                logits = [float(query[row, head, at] @ keys[row, head // 3, j]) * 0.3 for j in seen]
                wanted[row, head, at, seen] = torch.tensor(weights_of(logits, head, terms), dtype=torch.float64)
    weights = torch.cat(list(window_weights(query, keys, 0.3, valid=valid, block=block, terms=terms)), -1)
    torch.testing.assert_close(weights, wanted, atol=1e-12, rtol=0)
    mass = window_mass(query, keys, 0.3, valid=valid, block=block, terms=terms)
    torch.testing.assert_close(mass, wanted.sum(2), atol=1e-12, rtol=0)
    if terms.sinks is not None:
        assert (mass.sum(-1) < 5).all()
    if not padded:
        ctx = context(query, keys, scale=0.3)
        ctx.softcap, ctx.sinks = terms
        torch.testing.assert_close(pooled_mass(ctx, 5, 1, "avg"), wanted.sum(2)[..., :-5], atol=1e-12, rtol=0)


@each_term
@pytest.mark.parametrize("elements", [None, 300], ids=["whole", "blocked"])
def test_query_mass(terms, elements, monkeypatch):
    if elements is not None:
        monkeypatch.setattr("kvsieve.core.queries._BLOCK_ELEMENTS", elements)
    torch.manual_seed(2)
    query, keys = torch.randn(2, 6, 5, 8, dtype=torch.float64), torch.randn(2, 2, 13, 8, dtype=torch.float64)
    visible = torch.rand(2, 2, 5, 13) < 0.6
    visible[1, :, 2] = False
    wanted = torch.zeros(2, 6, 5, 13, dtype=torch.float64)
    for row in range(2):
        for head in range(6):
            for at in range(5):
                seen = visible[row, head // 3, at].nonzero()[:, 0].tolist()
                logits = [float(query[row, head, at] @ keys[row, head // 3, j]) * 0.3 for j in seen]
                wanted[row, head, at, seen] = torch.tensor(weights_of(logits, head, terms), dtype=torch.float64)
    for reduce, whole in (("sum", wanted.sum(2)), ("max", wanted.amax(2))):
        ours = query_mass(query, keys, 0.3, visible, reduce=reduce, terms=terms)
        torch.testing.assert_close(ours, whole, atol=1e-12, rtol=0)


@each_term
@pytest.mark.parametrize("size", [12, 11, 10])
@pytest.mark.parametrize("on_device", [False, True], ids=["", "on-device"])
def test_page_softmax(terms, size, on_device):
    torch.manual_seed(size)
    # Two KV rows of three query heads.
    terms = AttentionTerms(terms.softcap, None if terms.sinks is None else SINKS.view(2, 3))
    scores = torch.randn(2, 3, 4, dtype=torch.float64)
    length = DeviceLength(torch.tensor(size)) if on_device else None
    ours = page_softmax(scores.clone(), 12 if on_device else size, 3, length, asking(scores, 1.0, terms))
    for row in range(2):
        for head in range(3):
            flat = None if terms.sinks is None else terms.sinks.flatten()
            logits = [float(scores[row, head, j // 3]) for j in range(size)]
            wanted = weights_of(logits, row * 3 + head, AttentionTerms(terms.softcap, flat))
            assert (ours[row, head] / 3).tolist() == pytest.approx(wanted[::3], abs=1e-12)


def test_a_sink_may_be_far_above_or_below_all_logits():
    logits = torch.tensor([[1.0, 2.0, float("-inf")]])
    assert softmax(logits, torch.tensor([[1e4]])).tolist() == [[0.0, 0.0, 0.0]]
    torch.testing.assert_close(softmax(logits, torch.tensor([[-1e4]])), logits.softmax(-1))
