"""cache.snapshot() and cache.rollback(): many questions on one context, each as if it were the first."""

from __future__ import annotations

import gc

import pytest
import torch

import kvsieve
from kvsieve.errors import CacheStateError
from kvsieve.hf.compat import CACHE
from tiny import greedy
from tiny_models import build

GREEDY = greedy(return_dict_in_generate=True, output_logits=True)
PLANS = {
    "full": {},
    "snapkv": {"budget": 30, "window": 4},
    "adakv": {"budget": 30, "window": 4},
    "fastkv": {"budget": 30, "tsp_layer": 1, "tsp_rate": 0.5, "window": 4},
    "gemfilter": {"budget": 30, "layer": 1},
    "h2o": {"budget": 30},
    "lagkv": {"budget": 60, "lag": 8, "sinks": 2},
    "streamingllm": {"budget": 30, "every": 1},
}


@pytest.fixture(scope="module")
def talk():
    """A padded batch of contexts, their mask, and three questions of different lengths."""
    made = torch.Generator().manual_seed(11)
    context = torch.randint(2, 120, (2, 90), generator=made)
    mask = torch.ones_like(context)
    context[1, :7], mask[1, :7] = 0, 0
    return context, mask, [torch.randint(2, 120, (2, size), generator=made) for size in (5, 70, 1)]


def ask(sieve, cache, context, mask, question, **options):
    ids = torch.cat([context, question], 1)
    whole = torch.cat([mask, torch.ones_like(question)], 1)
    given = {"reduce": False, "max_new_tokens": 10, **options}
    return sieve.generate(ids, whole, cache=cache, **given, **GREEDY)


def contents(cache):
    out = []
    for layer in cache.sieve_layers.values():
        store = layer.store
        out += [store.keys, store.values, store.index, *([] if store.valid is None else [store.valid])]
        out += [part for part in layer.state.values() if isinstance(part, torch.Tensor)]
    return [part.clone() for part in out]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("reduce", [False, True], ids=["whole", "reduced"])
def test_every_question_is_asked_as_if_it_were_the_first(model, talk, name, reduce):
    context, mask, questions = talk
    with kvsieve.attach(model, kvsieve.plan(name, **PLANS[name])) as sieve:
        cache = sieve.prefill(context, mask, protect=[(3, 8)])
        held, size, taken = contents(cache), cache.memory_report(), cache.snapshot()
        for question in [*questions, questions[0]]:
            ours = ask(sieve, cache, context, mask, question, reduce=reduce)
            fresh = sieve.prefill(context, mask, protect=[(3, 8)])
            theirs = ask(sieve, fresh, context, mask, question, reduce=reduce)
            assert torch.equal(ours.sequences, theirs.sequences)
            assert same(ours.output.logits, theirs.output.logits)
            assert same(contents(cache), contents(fresh)) and cache.turn.record == fresh.turn.record
            cache.rollback(taken)
            assert same(contents(cache), held) and cache.memory_report() == size


def test_snapshots_of_several_moments_do_not_disturb_each_other(model, talk):
    """Both write behind the same entries: what came later in one conversation stays what it was."""
    context, questions = talk[0][:1], [each[:1] for each in talk[2]]

    def feed(tokens):
        # Token by token, as generate does, but with room to spare in the buffers.
        for token in tokens.T:
            model(input_ids=token[:, None], **{CACHE: cache})

    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        cache = sieve.new_cache()
        empty = cache.snapshot()
        sieve.prefill(context, cache=cache)
        feed(questions[2])
        first, known = cache.snapshot(), contents(cache)
        feed(questions[0])
        second, later = cache.snapshot(), contents(cache)
        for taken, wanted in ((first, known), (second, later), (first, known), (second, later)):
            cache.rollback(taken)
            assert same(contents(cache), wanted)
            feed(questions[1][:, :3])
        cache.rollback(empty)
        assert cache.num_seen == 0 and cache.nbytes() == 0
        sieve.prefill(context, cache=cache)
        feed(questions[2])
        assert same(contents(cache), known)


def test_a_fork_of_what_was_rolled_back_goes_its_own_way(model, talk):
    context, mask, questions = talk
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4, every=1)) as sieve:
        cache = sieve.prefill(context, mask)
        taken, known = cache.snapshot(), contents(cache)
        ask(sieve, cache, context, mask, questions[0])
        cache.rollback(taken)
        fork = cache.fork()
        wanted = ask(sieve, fork, context, mask, questions[1]).sequences
        assert same(contents(cache), known)
        assert torch.equal(ask(sieve, cache, context, mask, questions[1]).sequences, wanted)
        with pytest.raises(CacheStateError, match="taken of another cache"):
            fork.rollback(taken)
        with pytest.raises(CacheStateError, match="taken of another cache"):
            sieve.new_cache().rollback(taken)


def test_beams_and_failed_passes_are_rolled_back(model, talk):
    context, mask, questions = talk

    def fail(*given):
        raise RuntimeError("broken")

    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        cache = sieve.prefill(context, mask)
        taken, wanted = cache.snapshot(), ask(sieve, cache.fork(), context, mask, questions[0])
        ask(sieve, cache, context, mask, questions[0], num_beams=3)
        assert cache.conversation.batch == 6
        cache.rollback(taken)
        handle = model.model.layers[2].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="broken"):
            ask(sieve, cache, context, mask, questions[0])
        handle.remove()
        with pytest.raises(CacheStateError, match="middle of a prompt"):
            cache.snapshot()
        cache.rollback(taken)
        assert torch.equal(ask(sieve, cache, context, mask, questions[0]).sequences, wanted.sequences)


def test_no_snapshot_in_the_middle_of_a_prompt(model, talk):
    context, mask, _ = talk
    refused = []

    def watch(done, total):
        if done < total:
            with pytest.raises(CacheStateError, match="middle of a prompt"):
                cache.snapshot()
            refused.append(done)

    for plan in (kvsieve.plan("snapkv", window=4), kvsieve.plan("fastkv", tsp_layer=1, window=4)):
        with kvsieve.attach(model, plan) as sieve:
            cache = sieve.new_cache()
            sieve.prefill(context, mask, cache=cache, chunk=40, progress=watch)
            assert cache.snapshot().conversation.num_seen == 90
    assert refused == [40, 80] * 2


def test_sliding_window_layers_are_rolled_back_too(talk):
    context, mask, questions = talk
    model = build("gemma3_text", dtype=torch.float64)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        cache = sieve.prefill(context, mask)
        size, taken = cache.memory_report(), cache.snapshot()
        answers = []
        for _ in range(2):
            answers.append(ask(sieve, cache, context, mask, questions[1]))
            cache.rollback(taken)
            assert cache.memory_report() == size
    assert same(answers[0].output.logits, answers[1].output.logits)


def test_a_snapshot_costs_nothing_and_ends_with_its_last_name(model, talk):
    context, mask, questions = talk
    with kvsieve.attach(model, kvsieve.plan("streamingllm", budget=60, every=1)) as sieve:
        cache = sieve.prefill(context, mask)
        held = [layer.store.keys.data_ptr() for layer in cache.sieve_layers.values()]
        taken = cache.snapshot()
        assert [layer.store.keys.data_ptr() for layer in taken.layers] == held
        cache.rollback(taken)
        assert [layer.store.keys.data_ptr() for layer in cache.sieve_layers.values()] == held
        assert len(cache.snapshots) == 1
        del taken
        gc.collect()
        assert len(cache.snapshots) == 0
