"""LagKV and its variants: golden vector V4, the definition in slow Python, and recursion."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import LagKV
from layers import context, golden, kept
from tiny import tiny_prompt
from tiny_models import build

V4 = {"query": 3 * golden((1, 4, 24, 4), 1), "keys": 3 * golden((1, 2, 24, 4), 2), "values": golden((1, 2, 24, 4), 3)}
TAIL = list(range(17, 24))


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("lag", [[0, 1, 2, 4, 7, 8, 13, 15], [0, 1, 2, 6, 8, 10, 13, 15]]),
        ("local", [[0, 1, 3, 5, 8, 10, 13, 15], [0, 1, 3, 5, 8, 10, 13, 15]]),
        ("l2", [[0, 1, 3, 6, 7, 10, 14, 16], [0, 1, 3, 5, 9, 11, 13, 15]]),
    ],
)
def test_golden(variant, expected):
    evictor = LagKV(budget=15, sinks=2, lag=5, variant=variant)
    found = kept(evictor, context(**V4))
    if variant == "lag":
        # Slots 2, 4 and 6 of head 1 tie up to rounding; the vector's 2 and 6 are one way to break it.
        assert set(found[1][2:4]) < {2, 4, 6}
        found[1][2:4] = [2, 6]
    assert found == [each + TAIL for each in expected]


def test_golden_scores():
    scores = LagKV(budget=15, sinks=2, lag=5)._scores(V4["keys"][0, :, 2:22], V4["values"][0, :, 2:22])
    assert scores[0, 0].tolist() == pytest.approx([0.424305, 0.396813, 0.41908, 0.345751, 0.414051], abs=1e-6)


def slow(keys, values, sinks, lag, budget, variant):
    """Kept slots of one head's entries [n, D], from eqs. 7-15, plain Python over lists."""
    count, partitions = len(keys), (len(keys) - sinks) // lag
    if count <= budget or partitions < 2:
        return list(range(count))
    # Eq. 13: what partitions keep; the newest one more, as far as that goes.
    keep, more = divmod(budget - sinks - lag - (count - sinks) % lag, partitions - 1)
    out = list(range(sinks))
    for p in range(partitions - 1):
        first = sinks + p * lag
        total = [0.0] * lag
        for part in (keys, values):
            reference = first if variant == "local" else first + lag
            columns = list(zip(*part[reference : reference + lag].tolist(), strict=True))
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            spread = []
            for token in part[first : first + lag].tolist():
                scaled = [(x - lo) / max(hi - lo, 1e-6) for x, lo, hi in zip(token, low, high, strict=True)]
                spread.append(statistics.stdev(scaled))
            weights = torch.tensor(spread, dtype=torch.float64).softmax(0).tolist()
            total = [one + other for one, other in zip(total, weights, strict=True)]
        if variant == "l2":
            total = [-float(token.norm()) for token in keys[first : first + lag]]
        share = max(keep + (p >= partitions - 1 - more), 0)
        best = sorted(range(lag), key=lambda j: (-total[j], j))[:share]
        out += [first + j for j in sorted(best)]
    return out + list(range(sinks + (partitions - 1) * lag, count))


@pytest.mark.parametrize("variant", ["lag", "local", "l2"])
@pytest.mark.parametrize("length", [20, 25, 63, 64, 71], ids=lambda n: f"N{n}")
def test_equals_the_slow_reference_in_padded_batches(variant, length):
    torch.manual_seed(length)
    padding, sinks, lag = [0, 9], 3, 11
    keys, values = (torch.randn(2, 3, length, 8, dtype=torch.float64) for _ in range(2))
    ctx = context(torch.zeros(2, 6, 1, 8), keys, values=values, padding=padding)
    evictor = LagKV(budget="70%", sinks=sinks, lag=lag, variant=variant)
    counts = tuple(evictor.budget.entries(n) for n in ctx.step.lengths)
    selection = evictor.select(ctx, counts)
    for row, pad in enumerate(padding):
        true = length - pad
        for head in range(3):
            wanted = slow(keys[row, head, pad:], values[row, head, pad:], sinks, lag, counts[row], variant)
            if selection is None:
                assert wanted == list(range(true))
                continue
            real = selection.indices.shape[-1] if selection.lengths is None else selection.lengths[row]
            assert (selection.indices[row, head, -real:] - pad).tolist() == wanted


@pytest.mark.parametrize("budget", ["30%", "50%", "90%"])
def test_the_budget_is_met_to_the_entry(budget):
    evictor = LagKV(budget=budget, sinks=4, lag=16)
    for length in (64, 100, 211):
        asked = evictor.budget.entries(length, evictor.minimum)
        selection = evictor.select(context(torch.zeros(1, 1, 1, 4), torch.randn(1, 1, length, 4)), (asked,))
        found = selection.indices[0, 0].tolist()
        assert len(found) == asked < length
        judged = (length - 4) // 16 - 1
        kept = [sum(4 + 16 * p <= slot < 20 + 16 * p for slot in found) for p in range(judged)]
        assert max(kept) - min(kept) <= 1 and kept == sorted(kept), "alike, the newest one more"
        assert [slot for slot in found if slot >= 4 + 16 * judged] == list(range(4 + 16 * judged, length))


@pytest.mark.parametrize(
    ("sizes", "room", "protected", "shares"),
    [
        ([8, 8, 8], 12, [0, 0, 0], [4, 4, 4]),
        ([8, 8, 8], 14, [0, 0, 0], [4, 5, 5]),
        # What was judged before has no more than it kept then; the others share what that leaves.
        ([2, 3, 8], 11, [0, 0, 0], [2, 3, 6]),
        ([2, 3, 8], 6, [0, 0, 0], [2, 2, 2]),
        ([3, 8, 8], 2, [0, 0, 0], [0, 1, 1]),
        ([8, 8, 8], 12, [7, 0, 0], [7, 2, 3]),
        ([8, 8, 8], 3, [7, 0, 0], [7, 0, 0]),
        ([], 5, [], []),
    ],
)
def test_shares_by_hand(sizes, room, protected, shares):
    assert LagKV(budget=100, sinks=0, lag=8).shares(sizes, room, protected) == shares


def test_scaling_a_channel_changes_nothing():
    keys, values = V4["keys"], V4["values"]
    factor, shift = torch.tensor([2.0, 0.5, 7.0, 1.0]), torch.tensor([0.0, 3.0, -1.0, 9.0])
    evictor = LagKV(budget=15, sinks=2, lag=5)
    scaled = context(V4["query"], keys * factor + shift, values=values * factor - shift)
    assert kept(evictor, scaled) == kept(evictor, context(**V4))


def test_a_constant_channel_gives_numbers():
    # Beside the last partition of 10 the three before keep 6, 7 and 7.
    keys = torch.randn(1, 1, 40, 4)
    keys[..., 2] = 1.0
    assert len(kept(LagKV(budget=30, sinks=0, lag=10), context(torch.zeros(1, 1, 1, 4), keys))[0]) == 30


@pytest.mark.parametrize("length", [50, 7])
def test_decoding_goes_on_compressing(model, length):
    """Also after a prompt that fits, down to the budget whenever a partition has filled."""
    ids = tiny_prompt(1, length, seed=2)
    plan, sizes = kvsieve.plan("lagkv", budget=30, sinks=2, lag=8), []
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.new_cache()
        handle = model.register_forward_hook(lambda *_: sizes.append(max(cache.entries())))
        sieve.generate(ids, cache=cache, max_new_tokens=90, min_new_tokens=90, do_sample=False)
        handle.remove()
    assert sizes[0] == min(length, 30) and max(sizes) <= 30 + 8 and sizes.count(30) >= 7
    ends = [0, 1], list(range(length + 81, length + 89))
    for head in cache.layers[0].store.index[0].tolist():
        assert (head[:2], head[-8:]) == ends


def test_over_turns_the_first_layer_keeps_what_it_would_of_one_prompt(model):
    """Its keys and values do not depend on what was evicted; older partitions are cut to what the newer ones get."""
    ids = tiny_prompt(1, 320, seed=4)
    for budget, ends in ((60, (7, 60, 130, 137, 320)), (45, (30, 200, 320))):
        with kvsieve.attach(model, kvsieve.plan("lagkv", budget=budget, sinks=3, lag=8)) as sieve:
            cache = sieve.new_cache()
            for end in ends:
                sieve.prefill(ids[:, :end], cache=cache)
                assert cache.entries() == [min(end, budget)] * 4
            once = sieve.prefill(ids)
        turns, whole = (each.layers[0].store.index[0].tolist() for each in (cache, once))
        # A partition that once kept one fewer than the newest cannot have it back.
        assert all(len(set(one) & set(other)) >= budget - 4 for one, other in zip(turns, whole, strict=True))


def test_what_is_kept_does_not_depend_on_how_it_came(model):
    """Feeding the same keys and values in any chunks keeps the same: the first layer's do not depend on eviction."""
    ids = tiny_prompt(1, 90, seed=4)
    found = []
    for chunk in (None, 7, 16, 40):
        plan = kvsieve.plan("lagkv", budget="50%", sinks=3, lag=8, chunks=True)
        with kvsieve.attach(model, plan) as sieve:
            cache = sieve.prefill(ids, chunk=chunk)
        found.append(cache.sieve_layers[0].store.index.tolist())
    assert all(each == found[0] for each in found[1:])
    assert len(found[0][0][0]) == 3 + 4 * (87 // 8 - 1) + 8 + 87 % 8


def test_rows_of_a_batch_and_beams_go_their_own_way(model):
    ids = tiny_prompt(2, 50, seed=6)
    mask = torch.ones_like(ids)
    ids[1, :13], mask[1, :13] = 0, 0
    plan = kvsieve.plan("lagkv", budget="60%", sinks=2, lag=6)
    with kvsieve.attach(model, plan) as sieve:
        together = sieve.generate(ids, mask, max_new_tokens=20, min_new_tokens=20, do_sample=False).sequences
        alone = sieve.generate(ids[1:, 13:], max_new_tokens=20, min_new_tokens=20, do_sample=False).sequences
        beams = sieve.generate(ids, mask, max_new_tokens=9, num_beams=3, do_sample=False).sequences
        beam = sieve.generate(ids[1:, 13:], max_new_tokens=9, num_beams=3, do_sample=False).sequences
    assert torch.equal(together[1, 50:], alone[0, 37:])
    assert torch.equal(beams[1, 50:][: beam.shape[1] - 37], beam[0, 37:])


@pytest.mark.parametrize(
    "given", [{"lag": 1}, {"sinks": -1}, {"variant": "best"}, {"budget": 512, "chunks": True}], ids=str
)
def test_bad_parameters_are_refused(given):
    with pytest.raises(PlanError):
        kvsieve.plan("lagkv", **given)


def test_tokens_that_drop_nothing_are_not_asked_about(monkeypatch):
    asked, own = [], LagKV.select
    monkeypatch.setattr(
        LagKV, "select", lambda self, ctx, counts: asked.append(ctx.step.start) or own(self, ctx, counts)
    )
    model, ids = build("llama"), torch.arange(3, 63)[None]
    with kvsieve.attach(model, kvsieve.Plan(evict=LagKV(budget=30, sinks=2, lag=8))) as sieve:
        told = {"max_new_tokens": 21, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        stored = sieve.generate(ids, **told).cache.entries()
        drops = sorted(set(asked[model.config.num_hidden_layers :]))
        # Every layer acts when there is another partition of 8 tokens, and then alone.
        assert len(drops) in (2, 3) and all(b - a == 8 for a, b in itertools.pairwise(drops))
        asked.clear()
        monkeypatch.setattr(LagKV, "is_noop", lambda self, *given: False)
        assert sieve.generate(ids, **told).cache.entries() == stored and len(set(asked)) == 21
