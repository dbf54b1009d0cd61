"""Passes over several chunks of a prompt: every bit is that of a pass over each."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.hf.forward.pieces import COUNTS, joins_chunks, rows_are_alone
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.prompt.chunks import passes
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from small import fill, plan_of
from tiny import tiny_prompt
from tiny_models import build

CHUNK = 32
PLANS = ("full", "snapkv", "adakv", "fastkv", "gemfilter", "rocketkv-mt", "quest", "h2o", "lagkv", "kivi", "keydiff")


def read(model, plan, ids, together, chunk=CHUNK):
    """Logits after a prompt, what is stored, how often it was asked for chunks, and whether the plan lets them join."""
    asked = []

    def count() -> int:
        asked.append(together)
        return together

    with kvsieve.attach(model, plan, decode="eager") as sieve:
        cache = sieve.new_cache()
        joins = joins_chunks(plan, cache, None)
        options = ReadOptions(chunk=chunk, new_tokens=4, together=together and count, leave_last=False)
        left, mask = read_prompt(sieve, ids[:, :-1], None, cache, options)
        logits = sieve.feed(cache, ids[:, -1:], None, PassRequest(phase="decode"), logits=1).logits
    stores = [layer.store for layer in cache.layers]
    return logits, [part for store in stores for part in (store.keys, store.values, store.index)], len(asked), joins


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("name", PLANS)
def test_every_bit_is_that_of_a_pass_over_each_chunk(family, name):
    model = build(family)
    plan = plan_of(name, model)
    ids = tiny_prompt(1, 9 * CHUNK + 5, seed=1, low=5, high=90)
    logits, stored, passes_alone, joins = read(model, plan, ids, 1)
    for together in (2, 4):
        again, kept, passes_joined, _ = read(model, plan, ids, together)
        assert torch.equal(again, logits)
        assert all(torch.equal(one, other) for one, other in zip(kept, stored, strict=True))
        assert (passes_joined < passes_alone) == (joins and passes_alone > 0)


def test_a_last_chunk_that_is_longer_for_its_window_is_one():
    model, ids = build("llama"), tiny_prompt(1, 70, seed=2, low=5, high=90)
    plan = kvsieve.plan("snapkv", budget=30, window=20)
    whole = read(model, plan, ids, None, chunk=None)
    for together in (None, 4):
        logits, stored = read(model, plan, ids, together, chunk=8)[:2]
        torch.testing.assert_close(logits, whole[0])
        # Of each layer keys, values and the tokens they are of: those that the window chooses in one pass over all.
        assert all(torch.equal(one, other) for one, other in zip(stored[2::3], whole[1][2::3], strict=True))


def test_what_acts_on_chunks_or_has_padding_or_a_state_is_read_chunk_by_chunk():
    model, plan = build("llama"), kvsieve.Plan()
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.new_cache()
        assert joins_chunks(plan, cache, None)
        assert joins_chunks(plan, cache, torch.ones(1, 4)) and not joins_chunks(plan, cache, torch.tensor([[0, 1]]))
        assert not any(joins_chunks(plan_of(name, model), cache, None) for name in ("h2o", "kivi"))
    hybrid = build("qwen3_next")
    with kvsieve.attach(hybrid, plan) as sieve:
        assert not joins_chunks(plan, sieve.new_cache(), None)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_pass_longer_than_a_chunk_hides_its_padding(family):
    """Padding between a row's tokens moves the borders of passes, so that one holds two chunks."""
    model = fill(build(family, dtype=torch.float64))
    ids = tiny_prompt(2, 54, seed=1, low=5, high=90)
    mask = torch.ones_like(ids)
    mask[1, 21:41] = 0
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def logits(ids, mask):
        cache = sieve.prefill(ids[:, :20])
        result = sieve.generate(ids, mask, cache=cache, chunk=5, pad_token_id=0, eos_token_id=None, **options)
        return result.output.logits[1][-1]

    with kvsieve.attach(model, kvsieve.Plan()) as sieve:
        alone = ids[1:, mask[1].bool()]
        torch.testing.assert_close(logits(ids, mask), logits(alone, torch.ones_like(alone)))


def test_passes_take_what_is_told_and_the_last_chunk_alone():
    told = iter((1, 4, 2, 8))
    assert list(passes([10, 20, 30, 40, 50, 60, 70, 77], lambda: next(told))) == [
        (0, 10),
        (10, 50),
        (50, 70),
        (70, 77),
    ]
    assert list(passes([5], None)) == [(0, 5)]


def test_models_with_other_parts_than_linear_ones_are_not_trusted():
    assert not rows_are_alone(build("mixtral").model, CHUNK)
    odd = torch.nn.Sequential(torch.nn.Linear(4, 4))
    odd[0].forward = lambda rows: rows + rows.shape[1]
    assert not rows_are_alone(odd, CHUNK) and COUNTS[-1] > 1
