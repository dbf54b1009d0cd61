"""Spans of columns that are prefilled in one pass, beside one pass for each of them."""

from __future__ import annotations

import functools

import pytest
import torch

import kvsieve
from kvsieve.hf.edit import moved
from kvsieve.hf.edit.editor import Editor
from tiny_models import build

PLANS = {
    "full": {},
    "snapkv": {"budget": 40, "window": 8, "floor": 0},
    "adakv": {"budget": 40, "window": 8, "floor": 0},
    "kivi": {"bits": 4, "block": 16, "tail": 8},
    "rocketkv-mt": {"budget": 32, "window": 8, "floor": 0},
}
# Of one, of several heads per group, with soft caps, with sinks, with scaled positions.
FAMILIES = ["llama", "qwen3", "gemma", "phi3", "gpt_neox", "stablelm", "granite", "olmo2"]
NEAR = {"atol": 1e-9, "rtol": 1e-9, "equal_nan": True}


def tokens(size, seed):
    return torch.randint(3, 90, (1, size), generator=torch.Generator().manual_seed(seed))


IDS = tokens(120, 2)
DOCUMENTS = [tokens(size, size) for size in (40, 33, 50, 20)]
PIECES = [(0, 20), torch.tensor([11, 12, 13]), (24, 60), (80, 100), torch.tensor([9]), (100, 120)]


def edited(sieve, chunk=None):
    cache = sieve.prefill(IDS)
    return Editor(sieve, cache, IDS, 6, chunk=chunk).rewrite(PIECES), cache


def joined(sieve, chunk=None):
    found = sieve.join(DOCUMENTS, tokens(10, 0), kind="link:tokens=4", chunk=chunk)
    return (found.reread, found.reused), found.cache


def passes_of(sieve, monkeypatch, spans, work):
    """Return the result of `work`, its cache, and the number of passes; spans: most tokens of one that shares them."""
    calls = []
    feed = sieve.feed
    monkeypatch.setattr(moved, "_SHORT", spans)
    monkeypatch.setattr(sieve, "feed", lambda *given, **more: calls.append(0) or feed(*given, **more))
    result, cache = work(sieve)
    monkeypatch.setattr(sieve, "feed", feed)
    return result, cache, len(calls)


def assert_equal(first, second):
    assert first.num_seen == second.num_seen
    for layer, wanted in zip(first.sieve_layers.values(), second.sieve_layers.values(), strict=True):
        mine, other = layer.store.padded(), wanted.store.padded()
        assert torch.equal(mine.index, other.index)
        torch.testing.assert_close(mine.keys, other.keys, **NEAR)
        torch.testing.assert_close(mine.values, other.values, **NEAR)


def _compared(monkeypatch, family, plan, work):
    model = build(family).double()
    with kvsieve.attach(model, kvsieve.plan(plan, **PLANS[plan])) as sieve:
        told, cache, passes = passes_of(sieve, monkeypatch, 256, work)
        alone, wanted, more = passes_of(sieve, monkeypatch, -1, work)
        assert str(told) == str(alone)
        assert_equal(cache, wanted)
        assert cache.conversation.edits == wanted.conversation.edits
        for other in (cache, wanted):
            ids = torch.cat([tokens(other.num_seen, 1), tokens(9, 3)], 1)
            sieve.generate(ids, torch.ones_like(ids), cache=other, max_new_tokens=2, pad_token_id=0)
        assert_equal(cache, wanted)
    return more - passes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("work", [edited, joined], ids=["edit", "join"])
def test_families(monkeypatch, family, work):
    assert _compared(monkeypatch, family, "full", work) == 2


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("work", [edited, joined], ids=["edit", "join"])
def test_plans(monkeypatch, plan, work):
    """Spans of heads with different columns take a pass each."""
    apart = work is edited and plan in ("adakv", "snapkv")
    assert _compared(monkeypatch, "llama", plan, work) == (0 if apart else 2)


@pytest.mark.parametrize("work", [edited, joined], ids=["edit", "join"])
def test_chunks_hold_for_spans_together(monkeypatch, work):
    """Spans of 9, 6 and 7 tokens, and of 4 each."""
    assert _compared(monkeypatch, "llama", "full", functools.partial(work, chunk=8)) == (0 if work is edited else 1)
