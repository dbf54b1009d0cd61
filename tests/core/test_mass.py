"""Attention that queries give to entries, by the C kernel beside the same in float64."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, query_mass, window_mass
from kvsieve.kernels.cpu import mass as kernel

here = pytest.mark.skipif(kernel.reason() is not None, reason=str(kernel.reason()))
TERMS = {
    "plain": None,
    "capped": AttentionTerms(softcap=2.0),
    "sinks": AttentionTerms(sinks=torch.tensor([9.0, -1, 0, 3])),
}
NEAR = {"atol": 2e-5, "rtol": 1e-5}


def some(count, length, dim, batch=2):
    """Queries as a model's projection leaves them, and keys that are part of a longer buffer."""
    made = torch.Generator().manual_seed(count + length + dim)
    query = torch.randn(batch, count, 4, dim, generator=made).bfloat16().transpose(1, 2)
    keys = torch.randn(batch, 2, length + 3, dim, generator=made).bfloat16()[:, :, 3:]
    return query, keys, torch.rand(batch, 2, count, length, generator=made) < 0.6


@pytest.fixture
def calls(monkeypatch):
    """Queries of each call of the kernel."""
    found, own = [], kernel.query_mass
    monkeypatch.setattr(
        kernel,
        "query_mass",
        lambda asked, *rest, **named: found.append(asked.query.shape[2]) or own(asked, *rest, **named),
    )
    return found


@here
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("count, length, dim", [(4, 1, 64), (5, 64, 16), (70, 65, 128), (131, 300, 64), (64, 514, 6)])
def test_it_is_the_softmax_over_what_each_query_sees(count, length, dim, reduce, terms, calls):
    query, keys, visible = some(count, length, dim)
    visible[1, :, 2] = False
    weights = torch.rand(2, 1, count)
    given = {"weights": weights, "reduce": reduce, "terms": TERMS[terms]}
    exact = query_mass(query.double(), keys.double(), 0.3, visible, **given)
    assert not calls
    found = query_mass(query, keys, 0.3, visible, **given)
    assert calls == [count] and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, **NEAR)
    fewer = query_mass(query, keys, 0.3, visible, **given, entries=length // 2)
    torch.testing.assert_close(fewer, found[..., : length // 2], **NEAR)


@here
def test_what_is_visible_may_be_told_for_all_heads_queries_or_entries_at_once(calls):
    query, keys, visible = some(9, 150, 32)
    for part in (
        visible[:1, :1],
        visible[:, :, :1],
        visible[:, :1, :, :1],
        visible.transpose(2, 3).clone().transpose(2, 3),
    ):
        exact = query_mass(query.double(), keys.double(), 0.3, part)
        torch.testing.assert_close(query_mass(query, keys, 0.3, part).double(), exact, **NEAR)
    assert calls == [9] * 4


@here
def test_large_logits_neither_overflow_nor_vanish():
    query, keys, visible = some(8, 200, 64)
    exact = query_mass(query.double() * 64, keys.double(), 1.0, visible, reduce="max")
    found = query_mass(query * 64, keys, 1.0, visible, reduce="max")
    assert exact.amax() > 0.99
    torch.testing.assert_close(found.double(), exact, atol=2e-3, rtol=2e-3)


@here
@pytest.mark.parametrize("where", ["query", "keys"])
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_what_is_not_a_number_is_not_hidden(where, worst, reduce):
    query, keys, visible = some(70, 200, 64)
    (query if where == "query" else keys)[0, 0, 40, 3] = worst
    exact = query_mass(query.double(), keys.double(), 0.3, visible, reduce=reduce)
    found = query_mass(query, keys, 0.3, visible, reduce=reduce)
    assert exact[0, 0].isnan().all() and found[0, 0][visible[0, 0, 40] if where == "query" else 40].isnan().all()
    assert not found[1].isnan().any()


@here
@pytest.mark.parametrize("padded", [False, True])
def test_windows_see_what_stands_before_them(padded, calls):
    query, keys, _ = some(32, 700, 64)
    valid = None
    if padded:
        valid = torch.ones(2, 1, 700, dtype=torch.bool)
        valid[1, :, :90] = valid[0, :, 680] = False
    exact = window_mass(query.double(), keys.double(), 0.2, valid=valid)
    torch.testing.assert_close(window_mass(query, keys, 0.2, valid=valid).double(), exact, **NEAR)
    assert calls == [32]


@pytest.mark.parametrize("case", ["float32", "float64", "one query", "odd", "switched off"])
def test_what_it_does_not_take_is_computed_by_torch(case, calls, monkeypatch):
    query, keys, visible = some(1 if case == "one query" else 8, 40, 7 if case == "odd" else 8)
    if case.startswith("float"):
        query, keys = (each.to(getattr(torch, case)) for each in (query, keys))
    if case == "switched off":
        monkeypatch.setattr(kernel, "reason", lambda: "switched off")
    exact = query_mass(query.double(), keys.double(), 0.3, visible)
    torch.testing.assert_close(query_mass(query, keys, 0.3, visible).double(), exact, **NEAR)
    assert not calls
