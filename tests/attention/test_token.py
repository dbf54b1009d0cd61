"""Attention of the last tokens by the C kernel, beside the same in float64."""

from __future__ import annotations

import shutil

import pytest
import torch

from attend import AttentionTerms, asking, dense_attention
from kvsieve.attention import (
    AttentionRequest,
    DenseEntries,
    FlatEntries,
    attend,
    executors,
    next_border,
    token_kernel,
)
from kvsieve.kernels.cpu import prompt, token

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="kernels are compiled, and there is no gcc")
CLOSE = {torch.float32: {"atol": 5e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-3, "rtol": 1e-2}}
SCALE = 0.3


def numbers(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def softmax_of(query, keys, values, seen, weights=0):
    """[B, Hq, 1, D], keys and values [B, H, N, D], seen [B, H, N], weights the same or 0 -> float64."""
    groups = query.shape[1] // keys.shape[1]
    weights = torch.zeros(seen.shape) + weights
    keys, values, seen, weights = (part.repeat_interleave(groups, 1) for part in (keys, values, seen, weights))
    logits = query.double() @ keys.double().transpose(2, 3) * SCALE + weights[:, :, None]
    return logits.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1) @ values.double()


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels' functions that attention calls."""
    called = []
    for module, name in ((token, "token_attention"), (token, "ragged_token_attention"), (prompt, "few_attention")):
        own = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, own=own, name=name, **told: called.append(name) or own(*given, **told)
        )
    return called


def is_few(dtype, queries, dim):
    """Return True if the kernel of few tokens computes them here, with as many queries of a KV head."""
    return prompt.reason() is None and dtype == torch.bfloat16 and queries >= 3 and not dim % 16


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("batch, heads, groups, dim", [(1, 3, 3, 64), (2, 2, 1, 128), (1, 1, 5, 20)])
def test_dense_entries(calls, dtype, size, batch, heads, groups, dim):
    keys, values = (numbers(2, batch, heads, size + 9, dim, dtype=dtype)[at, :, :, :size] for at in range(2))
    query = numbers(batch, 1, heads * groups, dim, dtype=dtype).transpose(1, 2)
    found = dense_attention(query, keys, values, scale=SCALE)
    wanted = softmax_of(query, keys, values, torch.ones(batch, heads, size, dtype=torch.bool))
    torch.testing.assert_close(found.double(), wanted, **CLOSE[dtype])
    assert calls == ["few_attention" if is_few(dtype, groups, dim) else "token_attention"] and found.dtype == dtype


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("heads", [1, 3], ids=["for all heads", "for each head"])
def test_entries_that_are_hidden(calls, dtype, heads):
    keys, values = numbers(2, 2, 3, 150, 16, dtype=dtype)
    query = numbers(2, 6, 1, 16, dtype=dtype)
    valid = torch.rand(2, heads, 160, generator=torch.Generator().manual_seed(1))[:, :, :150] < 0.5
    # The newest is seen all the same, and nothing else in the second row.
    valid[:, :, -1], valid[1] = False, False
    keys[1, :, :-1] = float("nan")
    found = dense_attention(query, keys, values, scale=SCALE, valid=valid)
    seen = valid.expand(2, 3, -1).clone()
    seen[:, :, -1] = True
    wanted = softmax_of(query, keys.nan_to_num(), values, seen)
    torch.testing.assert_close(found.double(), wanted, **CLOSE[dtype])
    assert calls == ["token_attention"]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("new, groups", [(1, 3), (5, 3), (9, 14)])
def test_entries_of_all_heads_in_one_buffer(calls, dtype, new, groups):
    """Of several tokens each sees the entries up to its own."""
    batch, heads, before = 2, 3, 160
    used = before + new * heads
    keys, values = numbers(2, batch, used + 5, 64, dtype=dtype)
    query = numbers(batch, heads * groups, new, 64, dtype=dtype)
    slots = torch.arange(used + 5)
    owner = torch.where(slots < before, slots * 7 % 5, (slots - before) % heads).expand(batch, -1).clone()
    owner[:, used:] = heads
    if new > 1:
        # A token is padding.
        owner[1, before + heads : before + 2 * heads] = heads
    own = owner[:, None] == torch.arange(heads)[:, None]
    bias = torch.zeros(own.shape, dtype=dtype).masked_fill_(~own, torch.finfo(dtype).min)
    # Nobody's slots may hold anything.
    keys.masked_fill_((owner >= heads)[..., None], float("nan"))
    entries = FlatEntries(keys, values, bias, used=used, padded=new > 1)
    found = attend(AttentionRequest(asking(query, SCALE), entries))
    every = [part.nan_to_num()[:, None].expand(-1, heads, -1, -1) for part in (keys, values)]
    for at, query_of_one in enumerate(query.split(1, 2)):
        seen = own & (slots < used - (new - 1 - at) * heads)
        wanted = softmax_of(query_of_one, *every, seen)
        torch.testing.assert_close(found[:, :, at : at + 1].double(), wanted, **CLOSE[dtype])
    wanted = "few_attention" if new == 1 and is_few(dtype, groups, 64) else "ragged_token_attention"
    assert calls == [wanted]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("new, size", [(2, 3), (5, 64), (9, 130), (16, 66), (32, 300)])
@pytest.mark.parametrize("batch, heads, groups, dim", [(1, 2, 7, 64), (2, 3, 1, 128), (1, 1, 5, 21)])
@pytest.mark.parametrize("facts", ["", "hidden", "weights"])
def test_several_tokens(calls, dtype, new, size, batch, heads, groups, dim, facts):
    """Each sees the entries up to its own, whatever parts the queries are divided into."""
    keys, values = (numbers(2, batch, heads, size + 9, dim, dtype=dtype)[at, :, :, :size] for at in range(2))
    query = numbers(batch, new, heads * groups, dim, dtype=dtype).transpose(1, 2)
    real = torch.ones(batch, heads, size, dtype=torch.bool)
    weights = None
    if facts == "hidden":
        real = numbers(*real.shape, dtype=torch.float32) > 0
        real[:, :, -new:] = True
        keys[~real] = float("nan")
    if facts == "weights":
        weights = numbers(batch, heads, size + 9, dtype=torch.float32)[:, :, :size]
    given = {"scale": SCALE, "valid": real if facts == "hidden" else None, "log_weight": weights}
    found = token.token_attention(query, keys, values, **given)
    assert calls == ["token_attention"] and found.shape == query.shape and found.dtype == dtype
    for at in range(new):
        seen = real & (torch.arange(size) < size - new + 1 + at)
        terms = 0 if weights is None else weights
        wanted = softmax_of(query[:, :, at : at + 1], keys.nan_to_num(), values, seen, terms)
        torch.testing.assert_close(found[:, :, at : at + 1].double(), wanted, **CLOSE[dtype])
    if facts != "hidden":
        # Through the table, which prefers another kernel for bfloat16 on some processors.
        request = AttentionRequest(asking(query, SCALE), DenseEntries(keys, values, log_weight=weights))
        rows = {row.name: row for row in executors(request)}
        assert rows["C, last tokens"].why_not(request) is None
        assert torch.equal(rows["C, last tokens"].run(request), found)


def test_threads_do_not_change_what_several_tokens_get(monkeypatch):
    keys, values = numbers(2, 1, 2, 5000, 64, dtype=torch.float32)
    query = numbers(1, 14, 5, 64, dtype=torch.float32)
    found = []
    for threads in (1, 2, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(token.token_attention(query, keys, values, scale=SCALE))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    # Each thread gets some of the queries, unless these are too few.
    monkeypatch.setattr(token, "asked_threads", lambda: 4)
    assert token.why_not(query, keys, values, 2) is None
    monkeypatch.setattr(token, "asked_threads", lambda: 5)
    assert token.why_not(query, keys, values, 2) == "there are fewer KV rows than threads"


def test_a_token_that_sees_nothing_gets_zeros(calls):
    keys, values = numbers(2, 1, 8, 16, dtype=torch.float32)
    bias = torch.full((1, 2, 8), torch.finfo(torch.float32).min)
    entries = FlatEntries(keys, values, bias, used=8, padded=True)
    found = attend(AttentionRequest(asking(numbers(1, 4, 3, 16, dtype=torch.float32), SCALE), entries))
    assert not found.any() and calls == ["ragged_token_attention"]


def test_large_logits_are_no_infinities(calls):
    keys, values = numbers(2, 1, 1, 200, 16, dtype=torch.float32)
    query = numbers(1, 1, 1, 16, dtype=torch.float32)
    found = dense_attention(query, 1e4 * keys, values, scale=1.0)
    best = (query @ keys.transpose(2, 3)).argmax()
    torch.testing.assert_close(found[0, 0, 0], values[0, 0, best])
    assert calls == ["token_attention"]


def test_what_it_does_not_compute_is_left_to_torch(calls, monkeypatch):
    query, (keys, values) = numbers(1, 4, 1, 16, dtype=torch.float32), numbers(2, 1, 2, 30, 16, dtype=torch.float32)
    wanted = dense_attention(query, keys, values, scale=SCALE)
    calls.clear()

    def same(asked, keys, values, **told):
        found = dense_attention(asked, keys, values, scale=SCALE, **told)
        torch.testing.assert_close(found.float(), wanted, atol=2e-3, rtol=2e-2)
        return found

    assert same(query.clone().requires_grad_(), keys, values).requires_grad
    same(*(part.half() for part in (query, keys, values)))
    same(query, keys, torch.cat([values, values], -1)[..., :16])
    same(query, keys, values, terms=AttentionTerms(1e9, None))
    monkeypatch.setattr(token, "_LONG", 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    same(query, keys, values)
    assert calls == []


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("few", [False, True], ids=["", "kernel of few tokens"])
def test_tokens_change_their_executor_at_borders_only(dtype, threads, new, few, monkeypatch):
    monkeypatch.setattr(token, "asked_threads", lambda: threads)
    monkeypatch.setattr(prompt, "reason", lambda: None if few else "switched off for this test")
    query = torch.zeros(1, 4, new, 16, dtype=dtype)
    keys = torch.zeros(1, 2, 4200, 16, dtype=dtype)
    bias = torch.zeros(1, 2, 4200, dtype=dtype)
    for stored in (
        lambda size: DenseEntries(keys[:, :, :size], keys[:, :, :size]),
        lambda size: FlatEntries(keys[:, 0, :size], keys[:, 0, :size], bias[:, :, :size], used=size),
    ):
        requests = (AttentionRequest(asking(query, SCALE), stored(size)) for size in range(new + 1, 4200))
        chosen = [token_kernel(request) for request in requests]
        changes = {at + new + 1 for at in range(1, len(chosen)) if chosen[at] != chosen[at - 1]}
        assert changes <= {next_border(size - 1) for size in changes}
        first = "few" if few and new > 1 and dtype == torch.bfloat16 else "token"
        assert chosen[0] == first and (bool(changes) == (threads > 1 and first == "token"))
