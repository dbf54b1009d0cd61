"""Attention of many new tokens by products: in C on processors that have it, by torch's operations elsewhere."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, asking, dense_attention
from kvsieve.attention import AttentionRequest, DenseEntries, blocked, causal, prompt
from kvsieve.attention.prompt import why_torch
from kvsieve.kernels.cpu import prompt as compiled


def attended(query, keys, values, *, scale=0.2, terms=None, valid=None, torch_only=False):
    """By the C kernel, or by torch's products where it refuses."""
    request = AttentionRequest(asking(query, scale, terms), DenseEntries(keys, values, valid))
    kernel = not torch_only and causal.why_not_kernel(request) is None
    return causal.kernel_attention(request) if kernel else blocked.blocked_attention(request)


here = pytest.mark.skipif(why_torch() is not None, reason="no processor or compiler for it")
TERMS = {
    "plain": None,
    "capped": AttentionTerms(softcap=2.0),
    "sinks": AttentionTerms(sinks=torch.tensor([0.3, -1.0, 2.0, 0.0])),
}


def some(new, length, *, batch=1, dim=32, dtype=torch.bfloat16):
    made = torch.Generator().manual_seed(new + length)
    query = torch.randn(batch, new, 4, dim, generator=made).transpose(1, 2)
    keys, values = (torch.randn(batch, 2, length + 5, dim, generator=made)[:, :, :length] for _ in range(2))
    return query.to(dtype), keys.to(dtype), values.to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """New tokens of each call of the C kernel."""
    found, own = [], compiled.block_attention
    monkeypatch.setattr(
        compiled,
        "block_attention",
        lambda asked, *rest: found.append(asked.query.shape[2]) or own(asked, *rest),
    )
    return found


@here
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(
    "new, length, batch", [(64, 64, 1), (300, 300, 2), (129, 1000, 1), (128, 256, 1), (70, 135, 2)]
)
def test_the_kernel_sees_all_earlier_entries_and_no_later_one(new, length, batch, terms, calls):
    query, keys, values = some(new, length, batch=batch)
    found = attended(query, keys, values, terms=TERMS[terms])
    exact = attended(*(part.double() for part in (query, keys, values)), terms=TERMS[terms])
    assert calls == [new] and found.shape == exact.shape and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=0.01, rtol=0.01)


@here
def test_a_key_that_is_not_a_number_spoils_what_sees_it(calls):
    query, keys, values = some(200, 300)
    keys[0, 1, 250, 3] = float("nan")
    found = attended(query, keys, values)
    # The query of entry n is number n - 100, and heads 2 and 3 are those of KV head 1.
    spoilt = torch.zeros(4, 200, dtype=torch.bool)
    spoilt[2:, 150:] = True
    assert calls == [200] and torch.equal(found[0].isnan().any(-1), spoilt)


@here
def test_prompts_in_bfloat16_go_there(calls, monkeypatch):
    monkeypatch.setattr("kvsieve.attention.dense.faster_here", lambda query: True)
    query, keys, values = some(100, 150)
    exact = dense_attention(query.double(), keys.double(), values.double(), scale=0.2)
    torch.testing.assert_close(dense_attention(query, keys, values, scale=0.2).double(), exact, atol=0.01, rtol=0.01)
    assert calls == [100]


@pytest.mark.parametrize("case", ["few", "padded", "float32", "elsewhere"])
def test_what_the_kernel_does_not_take_is_computed_by_torch(case, calls, monkeypatch):
    query, keys, values = some(
        20 if case == "few" else 80, 120, dtype=torch.float32 if case == "float32" else torch.bfloat16
    )
    valid = torch.ones(1, 1, 120, dtype=torch.bool) if case == "padded" else None
    if case == "elsewhere":
        monkeypatch.setattr(prompt, "why_torch", lambda: "it is for another processor")
    found = attended(query, keys, values, valid=valid)
    assert torch.equal(found, attended(query, keys, values, valid=valid, torch_only=True)) and not calls


def test_a_gradient_is_refused_aloud():
    query, keys, values = some(80, 120)
    with pytest.raises(RuntimeError, match="requires grad|automatic differentiation"):
        attended(query.requires_grad_(), keys, values)
