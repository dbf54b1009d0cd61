"""One reading for many evictors, forks, and caches that become rows of one."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.batching import can_stack, stack
from kvsieve.hf.compat import CACHE
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.shared.prompt import after_prompt, answer_logits, next_logits, read_alone, read_shared
from tiny import tiny_prompt
from tiny_models import build

PLANS = {
    "streamingllm": kvsieve.plan("streamingllm", budget="40%"),
    "knorm": kvsieve.plan("knorm", budget=11, skip_layers=1),
    "snapkv": kvsieve.plan("snapkv", budget="40%", window=4, kernel=3),
    "fastkv": kvsieve.plan("fastkv", budget="30%", tsp_layer=0, tsp_rate=0.5, window=6, kernel=3),
}
FULL = kvsieve.plan("full")


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, 45, seed=7)


def greedy(model, cache, logits, steps=6):
    """[rows, steps] tokens and [rows, steps, V] the logits that chose them."""
    chosen, seen = [], []
    with kvsieve.attach(model, FULL) as sieve, torch.no_grad():
        sieve.adopt(cache)
        for _ in range(steps):
            seen.append(logits)
            chosen.append(logits.argmax(-1))
            logits = model(input_ids=chosen[-1][:, None], **{CACHE: cache}, use_cache=True).logits[:, -1]
    return torch.stack(chosen, 1), torch.stack(seen, 1)


def stored(cache):
    return [(layer.store.index, layer.store.keys, layer.store.values) for layer in cache.sieve_layers.values()]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("chunk", [None, 17])
def test_reduced_is_what_the_plan_itself_keeps(model, ids, name, chunk):
    plan = PLANS[name]
    shared = read_shared(model, plan.propagate, ids, window=plan.window + 3, options=ReadOptions(chunk))
    cache = shared.reduced(plan.evict)
    with kvsieve.attach(model, plan) as sieve:
        own = sieve.prefill(ids, chunk=chunk)
        wanted = sieve.generate(ids, max_new_tokens=6, do_sample=False, chunk=chunk).sequences[0, ids.shape[1] :]
    for ours, theirs in zip(stored(cache), stored(own), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
    assert cache.turn.record == own.turn.record
    assert greedy(model, cache, shared.logits)[0][0].tolist()[: len(wanted)] == wanted.tolist()


def test_the_shared_cache_stays_whole_and_every_copy_is_its_own(model, ids):
    shared = read_shared(model, None, ids, window=8)
    before = [tuple(part.clone() for part in layer) for layer in stored(shared.cache)]
    for plan in (PLANS["snapkv"], FULL, *(kvsieve.plan("knorm", budget=share) for share in ("90%", "100%"))):
        greedy(model, shared.reduced(plan.evict), shared.logits)
    for was, now in zip(before, stored(shared.cache), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(was, now, strict=True))
    held = {part.data_ptr() for layer in stored(shared.cache) for part in layer}
    for evictor in (None, PLANS["knorm"].evict):
        assert not held & {part.data_ptr() for layer in stored(shared.reduced(evictor)) for part in layer}


def test_an_evictor_that_looks_further_back_is_refused(model, ids):
    shared = read_shared(model, None, ids, window=3)
    with pytest.raises(CacheStateError, match="4 queries and 3 were recorded"):
        shared.reduced(PLANS["snapkv"].evict)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "gemma3n_text"])
def test_windows_states_and_shared_kv_are_shared_and_stacked_too(name):
    """Copies that take turns do not write into each other, and as rows of one cache they answer as they do alone."""
    model = build(name, dtype=torch.float64)
    ids = tiny_prompt(1, 45, seed=7)
    evictors = [PLANS["snapkv"].evict, PLANS["streamingllm"].evict]
    shared = read_shared(model, None, ids, window=4)
    wanted = []
    for evictor in evictors:
        with kvsieve.attach(model, kvsieve.Plan(evict=evictor, name="alone")) as sieve:
            wanted.append(sieve.generate(ids, max_new_tokens=6, do_sample=False).sequences[0, ids.shape[1] :].tolist())
    caches = [shared.reduced(evictor) for evictor in evictors]
    assert can_stack(caches)
    rows = stack(caches, reserve=3)
    tokens, logits = greedy(model, rows, shared.logits.expand(2, -1))
    apart = [[shared.logits] for _ in evictors]
    with kvsieve.attach(model, FULL) as sieve, torch.no_grad():
        # Token by token in turn, on caches that came from one.
        for _ in range(5):
            for cache, seen in zip(caches, apart, strict=True):
                sieve.adopt(cache)
                seen.append(model(input_ids=seen[-1].argmax(-1)[:, None], **{CACHE: cache}).logits[:, -1])
    for row, seen in enumerate(apart):
        assert tokens[row].tolist()[: len(wanted[row])] == wanted[row]
        torch.testing.assert_close(logits[row], torch.cat(seen), rtol=0, atol=1e-4)
    assert shared.cache.num_seen == 45


def test_a_fork_answers_as_its_origin_and_leaves_it_alone(model, ids):
    with kvsieve.attach(model, PLANS["snapkv"]) as sieve:
        cache = sieve.prefill(ids)
        more = torch.cat([ids, torch.tensor([[5, 9, 11]])], 1)
    with kvsieve.attach(model, FULL) as sieve, torch.no_grad():
        sieve.adopt(cache)
        first = next_logits(sieve, cache.fork(), more)
        second = next_logits(sieve, cache.fork(), more)
        last = next_logits(sieve, cache, more)
    assert torch.equal(first, second) and torch.equal(first, last)
    assert cache.num_seen == 48


def test_a_cache_in_mid_prompt_is_not_forked(model, ids):
    with kvsieve.attach(model, FULL) as sieve:
        cache = sieve.new_cache()
    cache.status = "broken"
    with pytest.raises(CacheStateError, match="middle of a prompt"):
        cache.fork()


def test_stacked_rows_decode_as_they_do_alone(model, ids):
    shared = read_shared(model, None, ids, window=8)
    adakv = kvsieve.plan("adakv", budget="40%", window=4)
    evictors = [None, *(PLANS[name].evict for name in ("snapkv", "knorm", "streamingllm")), adakv.evict]
    alone = [greedy(model, shared.reduced(evictor), shared.logits) for evictor in evictors]
    caches = [shared.reduced(evictor) for evictor in evictors]
    rows = stack(caches, reserve=3)
    assert rows.conversation.batch == 5 and rows.num_seen == ids.shape[1]
    assert len({cache.entries()[0] for cache in caches}) > 1, "rows of unequal length are what this is about"
    assert caches[4].sieve_layers[1].store.is_ragged, "and heads of unequal length"
    tokens, logits = greedy(model, rows, shared.logits.expand(5, -1))
    for row, (wanted, scores) in enumerate(alone):
        assert torch.equal(tokens[row], wanted[0])
        torch.testing.assert_close(logits[row], scores[0], rtol=0, atol=1e-10)
    # Where they came from, nothing moved.
    assert [cache.num_seen for cache in caches] == [45] * 5


def test_heads_of_another_number_are_not_stacked(model, ids):
    shared = read_shared(model, None, ids, window=8)
    wide = kvsieve.plan("snapkv", budget="40%", window=4, kernel=3, per_query_head=True)
    caches = [shared.reduced(PLANS["snapkv"].evict), shared.reduced(wide.evict)]
    assert can_stack(caches[:1] * 2) and not can_stack(caches)


@pytest.mark.parametrize(
    "plan",
    [
        kvsieve.plan("h2o", budget=20, every=5),
        kvsieve.plan("lagkv", budget=20, sinks=2, lag=4),
        kvsieve.plan("snapkv", budget=20, window=4, kernel=3, every=4),
        kvsieve.plan("quest", budget=16, page=4),
        kvsieve.plan("rocketkv-mt", budget=24, window=4),
        kvsieve.plan("snapkv", budget=20, window=4, kernel=3),
    ],
    ids=repr,
)
def test_a_given_answer_reads_what_a_generated_one_does(model, ids, plan):
    answer = tiny_prompt(1, 11, seed=3)
    options = ReadOptions(new_tokens=answer.shape[1])
    wanted, ends = [], []
    for given in (False, True):
        cache, _, _ = read_alone(model, plan, ids, options=options)
        with kvsieve.attach(model, after_prompt(plan)) as sieve, torch.no_grad():
            sieve.adopt(cache)
            if given:
                some = answer_logits(sieve, cache.fork(), answer, [0, 6, 9])
                wanted.append(answer_logits(sieve, cache, answer))
            else:
                each = [model(input_ids=answer[:, i : i + 1], **{CACHE: cache}).logits for i in range(11)]
                wanted.append(torch.cat(each, 1))
        ends.append(cache)
    torch.testing.assert_close(wanted[1], wanted[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(some, wanted[0][:, [0, 6, 9]], rtol=0, atol=1e-6)
    assert ends[0].entries() == ends[1].entries()
    if plan.evict is not None and plan.evict.when.steps:
        assert max(ends[0].entries()) < 20 + 11
