"""Decoding with fixed shapes over encoded entries: tokens are those of the eager decoder, from block to block.

As in test_fixed.py a stand-in runs a recorded pass again. What attention reads is compared exactly in
cache/test_fixed.py; here a number between two codes may get either, which moves logits by less than CLOSE, and the
entries of a block that went missing would move them by more.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import kvsieve
from faraway import Away, sent, watched
from interpreted import interpreted
from kvsieve.cache import PackedStore
from kvsieve.hf.decode import engine as fixed
from kvsieve.methods import KIVI, Int8, Outlier, Rotated, SnapKV
from kvsieve.planning.plans import Plan
from kvsieve.shared.prompt import next_logits
from small import NothingWaits, plan_of, recorder_stand_in
from tiny import tiny_prompt
from tiny_models import build

SIZES = {"block": 8, "tail": 6}
PLANS = {
    "kivi": Plan(codec=KIVI(bits=8, group=8, **SIZES)),
    "kivi with sinks": Plan(codec=KIVI(bits=8, group=8, sinks=3, **SIZES)),
    "rotated": Plan(codec=Rotated(bits=4, **SIZES)),
    "int8": Plan(codec=Int8(**SIZES)),
    "outlier": Plan(codec=Outlier(bits=4, group=8, **SIZES)),
    "snapkv": Plan(evict=SnapKV(budget=60, window=4), codec=Int8(**SIZES)),
    "rest": Plan(evict=SnapKV(budget=60, window=4), rest=Int8(**SIZES)),
    "adakv": kvsieve.plan("adakv", budget=50, window=4, codec=Int8(**SIZES)),
}
CLOSE = 0.1


@functools.cache
def model():
    return build("llama", num_hidden_layers=3)


@pytest.fixture
def stand_in():
    with recorder_stand_in():
        yield


def tokens(rows, size, seed=3):
    return tiny_prompt(rows, size, seed=seed)


def mask_of(rows, size):
    mask = torch.ones(rows, size, dtype=torch.long)
    mask[1:, :23] = 0
    return mask


def fed(plan, decode, steps, on=None):
    """Logits [B, T, V] of what `steps(sieve, feed)` feeds token by token; feed(cache, ids, tokens) gives all ids."""
    found = []

    def feed(cache, ids, more):
        for column in more.T:
            ids = torch.cat([ids, column[:, None]], 1)
            found.append(next_logits(sieve, cache, ids, mask_of(*ids.shape)))
        return ids

    with kvsieve.attach(on or model(), plan, decode=decode) as sieve, torch.no_grad():
        steps(sieve, feed)
    return torch.cat(found, 1)


def encoded(cache):
    """Entries that are encoded, of the KV head with the most, in each layer."""
    stores = [layer.store for layer in cache.layers]
    return [sum(body.width for body in each.bodies) if isinstance(each, PackedStore) else 0 for each in stores]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_answers_across_blocks_are_those_of_the_eager_decoder(stand_in, name, rows):
    seen = {}

    def steps(sieve, feed):
        ids = tokens(rows, 80)
        cache = sieve.prefill(ids, mask_of(rows, 80))
        before = encoded(cache)
        feed(cache, ids, tokens(rows, 40, seed=4))
        passes, stores = cache.turn.record.passes, [layer.store for layer in cache.layers]
        told = [(store.lengths, store.index) for store in stores]
        seen[passes.fixed] = [now - then for now, then in zip(encoded(cache), before, strict=True)], told, passes

    wanted, ours = (fed(PLANS[name], decode, steps) for decode in ("eager", "graph"))
    assert (wanted - ours).abs().max() < CLOSE
    (more, there, _), (same, here, passes) = seen[0], seen[40]
    assert more == same and (min(more) >= 4 * SIZES["block"] or PLANS[name].codec is None)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in zip(there, here, strict=True))
    assert passes.captures == 1 and passes.reason is None


def test_buffers_stay_where_they_are(stand_in):
    def held(cache):
        return [[part.data_ptr() for part in layer.store.tensors if part is not None] for layer in cache.layers]

    def steps(sieve, feed):
        ids = tokens(2, 80)
        cache = sieve.prefill(ids, mask_of(2, 80))
        ids = feed(cache, ids, tokens(2, 1))
        first, before = held(cache), encoded(cache)
        for token in tokens(2, 40, seed=4).T:
            ids = feed(cache, ids, token[:, None])
            assert held(cache) == first
        assert min(now - then for now, then in zip(encoded(cache), before, strict=True)) >= 32

    fed(PLANS["kivi"], "graph", steps)


def test_the_host_waits_where_a_block_is_encoded_and_nowhere_else(monkeypatch):
    away, waited = sent(build("llama", num_hidden_layers=2)), []

    def record(run):
        def again():
            before = sum(waits.values())
            out = run()
            waited.append(sum(waits.values()) - before)
            return out

        run()
        return again

    monkeypatch.setitem(fixed.RECORDERS, "graph", lambda device: record)
    # It knows no such device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    plan, each = PLANS["rotated"], []
    with watched() as waits, kvsieve.attach(away, plan, decode="graph") as sieve, torch.no_grad():
        ids = tokens(1, 80)
        cache = sieve.prefill(Away(ids))
        for token in tokens(1, 24, seed=4).T:
            ids, before = torch.cat([ids, token[:, None]], 1), encoded(cache)
            waits.clear()
            next_logits(sieve, cache, Away(ids))
            each.append((sum(waits.values()), encoded(cache) != before))
    assert waited == [0] * 24 and cache.turn.record.passes.captures == 1
    blocks = [number for number, (_, grew) in enumerate(each) if grew]
    assert len(blocks) >= 2
    # Behind a block the pass is told of it; the first one is recorded.
    told = {0, *blocks, *(number + 1 for number in blocks)}
    assert [count for number, (count, _) in enumerate(each) if number not in told] == [0] * (24 - len(told))


@pytest.mark.parametrize("name", ["int8", "adakv"])
def test_rollbacks_forks_turns_and_reordered_rows(stand_in, name):
    def steps(sieve, feed):
        ids, more = tokens(2, 80), tokens(2, 12, seed=6)
        cache = sieve.prefill(ids, mask_of(2, 80))
        seen = feed(cache, ids, more[:, :4])
        taken, fork = cache.snapshot(), cache.fork()
        feed(cache, seen, more)
        cache.rollback(taken)
        seen = feed(cache, seen, more.flip(1))
        feed(fork, seen[:, :84], more)
        whole = torch.cat([feed(cache, seen, more), tokens(2, 20, seed=7)], 1)
        whole = feed(sieve.prefill(whole, mask_of(*whole.shape), cache=cache), whole, more)
        cache.batch_select_indices(torch.tensor([1]))
        alone = whole[1:]
        for token in more[:1].T:
            alone = torch.cat([alone, token[None]], 1)
            mask = mask_of(2, alone.shape[1])[1:]
            found.append(next_logits(sieve, cache, alone, mask))
        passes.append(cache.turn.record.passes)

    found, passes = [], []
    wanted, ours = (fed(PLANS[name], decode, steps) for decode in ("eager", "graph"))
    assert (wanted - ours).abs().max() < CLOSE
    assert (torch.cat(found[:12]) - torch.cat(found[12:])).abs().max() < CLOSE
    assert passes[0].fixed == 0 and passes[1].fixed >= 20 and passes[1].eager == 0


def test_a_prompt_too_short_to_be_encoded_is_recorded_again_once_it_is_not(stand_in):
    plan, captures = Plan(codec=Int8(block=32, tail=8)), []

    def steps(sieve, feed):
        ids = tokens(1, 14)
        cache = sieve.prefill(ids)
        ids = feed(cache, ids, tokens(1, 10))
        captures.append((cache.turn.record.passes.captures, encoded(cache)))
        feed(cache, ids, tokens(1, 50, seed=4))
        captures.append((cache.turn.record.passes.captures, encoded(cache)))

    wanted, ours = (fed(plan, decode, steps) for decode in ("eager", "graph"))
    assert (wanted - ours).abs().max() < CLOSE
    assert captures[2:] == [(1, [0] * 3), (2, [64] * 3)]


@pytest.mark.parametrize("evict", ["streamingllm", "knorm"])
def test_evictors_that_act_while_decoding(stand_in, evict):
    """On the tokens on which they act passes run eagerly, and encode blocks again."""
    plan = plan_of(evict, model(), every=10, codec=Int8(**SIZES))
    passes = []

    def steps(sieve, feed):
        ids = tokens(1, 80)
        cache = sieve.prefill(ids)
        feed(cache, ids, tokens(1, 30, seed=4))
        passes.append(cache.turn.record.passes)

    wanted, ours = (fed(plan, decode, steps) for decode in ("eager", "graph"))
    assert (wanted - ours).abs().max() < CLOSE
    assert passes[1].fixed >= 15 and passes[1].reason in (None, f"{type(plan.evict).__name__} acts on this token")


@pytest.mark.parametrize("name", ["quest", "hsa", "rocketkv-mt"])
def test_chosen_entries_are_read_eagerly_and_that_is_told(stand_in, name):
    plan = dataclasses.replace(plan_of(name, model()), codec=Int8(**SIZES))
    told = []

    def steps(sieve, feed):
        ids = tokens(1, 80)
        cache = sieve.prefill(ids)
        feed(cache, ids, tokens(1, 4))
        told.append(cache.turn.record.passes)

    wanted, ours = (fed(plan, decode, steps) for decode in ("eager", "graph"))
    assert torch.equal(wanted, ours)
    assert told[1].fixed == 0 and told[1].reason == "encoded entries are decoded one by one as they are chosen"


def test_with_kernels(stand_in):
    """What a GPU would run, under Triton's interpreter."""
    small = build("llama", num_hidden_layers=1)

    def steps(sieve, feed):
        ids = tokens(2, 40)
        feed(sieve.prefill(ids, mask_of(2, 40)), ids, tokens(2, 5, seed=4))

    plan = Plan(codec=Int8(block=8, tail=2))
    wanted = fed(plan, "eager", steps, small)
    with interpreted():
        ours = fed(plan, "graph", steps, small)
    assert (wanted - ours).abs().max() < CLOSE


def test_a_pass_waits_for_nothing_from_block_to_block():
    small = build("llama", num_hidden_layers=1)
    reasons = []

    def steps(sieve, feed):
        ids = tokens(1, 80)
        cache = sieve.prefill(ids)
        feed(cache, ids, tokens(1, 24, seed=4))
        reasons.append(cache.turn.record.passes.reason)

    with recorder_stand_in(watched=NothingWaits):
        wanted, ours = (fed(PLANS["rotated"], decode, steps, small) for decode in ("eager", "graph"))
    assert "cannot be recorded" not in str(reasons)
    assert (wanted - ours).abs().max() < CLOSE
