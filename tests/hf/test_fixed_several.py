"""Passes over several tokens with fixed shapes: one recording for each number of them, and tokens taken back."""

from __future__ import annotations

import functools

import pytest
import torch

import kvsieve
from codecs_of_tests import Formats
from drafted import drafted
from interpreted import interpreted
from kvsieve.core.codes import CodeFormat
from kvsieve.hf.drafts.views import checked_view, view_drafter
from kvsieve.hf.forward.request import PassRequest
from oracle import let_drafts_know
from small import plan_of, recorder_stand_in
from tiny import greedy, tiny_prompt
from tiny_models import build

CODEC = Formats(of_keys=CodeFormat(8, "channel"), of_values=CodeFormat(8, "token", 16), block=16, tail=4)
PLANS = {"full": {}, "snapkv": {"budget": 24, "window": 4}, "codec": {}}
# Tokens of each pass, and how many of them stay.
PASSES = [(1, 1), (3, 2), (3, 3), (1, 1), (5, 1), (3, 0), (5, 4), (1, 1), (5, 5), (3, 1), (1, 1)]


@functools.cache
def model(dtype):
    return build("llama", dtype=dtype, num_hidden_layers=2)


def planned(name):
    return kvsieve.Plan(codec=CODEC) if name == "codec" else plan_of(name, model(torch.float64), **PLANS[name])


def fed(name, decode, rows, dtype=torch.float64, passes=PASSES):
    """Logits of all passes, the stored keys, and the turn's record."""
    found = []
    ids = tiny_prompt(rows, 60, seed=3)
    mask = torch.ones_like(ids)
    mask[1:, :13] = 0
    with kvsieve.attach(model(dtype), planned(name), decode=decode) as sieve, torch.no_grad():
        cache = sieve.prefill(ids, mask)
        for at, (size, count) in enumerate(passes):
            seen = cache.conversation.mask
            seen = None if seen is None else torch.cat([seen, seen.new_ones(rows, size)], 1)
            request = PassRequest(tentative=True) if at % 4 else PassRequest(phase="decode")
            result = sieve.feed(cache, tiny_prompt(rows, size, seed=at), seen, request, logits=size)
            found.append(result.logits)
            if result.transaction is not None:
                result.transaction.accept(count)
    stores = [layer.store for layer in cache.sieve_layers.values()]
    real = [store.keys if store.valid is None else store.keys * store.valid[..., None] for store in stores]
    return found, real, cache.turn.record


def same(ours, theirs, close):
    for one, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        torch.testing.assert_close(one, other, atol=close, rtol=close)
    counted = ("tokens", "entries")
    assert [getattr(ours[2].reads, fact) for fact in counted] == [getattr(theirs[2].reads, fact) for fact in counted]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_passes_equal_those_of_the_eager_decoder(name, rows):
    wanted = fed(name, "eager", rows)
    with recorder_stand_in():
        ours = fed(name, "graph", rows)
    same(ours, wanted, 1e-4)
    passes = ours[2].passes
    # Under the codec some passes encode entries.
    assert passes.captures >= 3 and passes.fixed >= (6 if name == "codec" else 9)


def test_rows_that_keep_different_numbers_of_tokens():
    passes = [(3, (2, 1)), (3, (0, 3)), (3, (1, 2)), (1, 1), (3, 3), (3, (2, 2)), (1, 1)]
    wanted = fed("full", "eager", 2, passes=passes)
    with recorder_stand_in():
        ours = fed("full", "graph", 2, passes=passes)
    same(ours, wanted, 1e-4)
    assert ours[2].passes.fixed >= 4


@pytest.mark.parametrize("name", ["full", "codec"])
def test_with_kernels(name):
    """What a GPU would run, under Triton's interpreter."""
    passes = PASSES[:7]
    wanted = fed(name, "eager", 2, torch.float32, passes)
    with recorder_stand_in(), interpreted():
        ours = fed(name, "graph", 2, torch.float32, passes)
    same(ours, wanted, 1e-3)
    executors = ours[2].reads.executors.values()
    assert ours[2].passes.fixed >= 3 and all(one.startswith("Triton") for one in executors)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("quest", {"budget": 16}, "each of several tokens chooses what it reads"),
        ("adakv", {"budget": 24, "window": 4}, "heads that keep different numbers"),
        ("streamingllm", {"budget": 24, "every": 2}, "dropped or encoded within a pass"),
    ],
)
def test_passes_that_are_run_eagerly_say_why(name, given, reason):
    plan = plan_of(name, model(torch.float64), **given)
    with recorder_stand_in(), kvsieve.attach(model(torch.float64), plan, decode="graph") as sieve, torch.no_grad():
        cache = sieve.prefill(tiny_prompt(1, 60, seed=3))
        for _ in range(2):
            sieve.feed(cache, tiny_prompt(1, 3, seed=1), None, PassRequest(tentative=True))
    assert reason in cache.turn.record.passes.reason


def test_a_cache_has_a_few_recordings():
    with recorder_stand_in(), kvsieve.attach(model(torch.float64), planned("full"), decode="graph") as sieve:
        with torch.no_grad():
            cache = sieve.prefill(tiny_prompt(1, 60, seed=3))
            for size in range(2, 9):
                for _ in range(6):
                    sieve.feed(
                        cache, tiny_prompt(1, size, seed=1), None, PassRequest(tentative=True)
                    ).transaction.accept(0)
    passes = cache.turn.record.passes
    assert (passes.captures, passes.fixed) == (6, 30)
    assert passes.reason == "passes of 6 other numbers of tokens are recorded"


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_drafts_of_an_answer_are_verified_by_one_recording(monkeypatch, name):
    """Passes with fewer drafts are filled up, those of the answer's last tokens too."""
    ids = tiny_prompt(1, 60, seed=3)
    options = greedy(max_new_tokens=30)
    with recorder_stand_in(), kvsieve.attach(model(torch.float64), planned(name), decode="graph") as sieve:
        plain = sieve.generate(ids, **options)
        let_drafts_know(monkeypatch, plain.sequences.tolist())
        ours = sieve.generate(ids, draft="lookup:tokens=6:adapt=false", **options)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.stats.drafts.accepted > 10
    passes = ours.cache.turn.record.passes
    assert (passes.captures, passes.eager, passes.reason) == (1, 0, None)


def test_drafts_by_a_copy_of_the_cache_are_recorded():
    ids = tiny_prompt(1, 60, seed=3)
    with recorder_stand_in(), kvsieve.attach(model(torch.float32), planned("full"), decode="graph") as sieve:
        plan = checked_view("snapkv:budget=24:window=4:floor=0", sieve)
        drafters = []

        def opened(cache):
            drafters.append(view_drafter(sieve, cache, plan))
            drafters[0].close = lambda: None
            return drafters[0]

        with torch.no_grad():
            drafted(sieve, ids, 12, opened)
    passes = drafters[0]._passes.cache.turn.record.passes
    assert passes.fixed > passes.eager
