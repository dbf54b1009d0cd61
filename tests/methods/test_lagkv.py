"""LagKV and its variants: golden vector V4, the definition in slow Python, and recursion."""

from __future__ import annotations

import statistics

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import LagKV
from kvsieve.models.families import build
from layers import context, golden, kept

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


def slow(keys, values, sinks, lag, keep, variant, done):
    """Kept slots of one head's entries [n, D]; `done`: finished prefix. From eqs. 7-15, plain Python over lists."""
    count = len(keys)
    if count < done + 2 * lag:
        return list(range(count)), done
    out, partitions = list(range(done)), (count - done) // lag
    for p in range(partitions - 1):
        first = done + p * lag
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
        best = sorted(range(lag), key=lambda j: (-total[j], j))[:keep]
        out += [first + j for j in sorted(best)]
    return out + list(range(done + (partitions - 1) * lag, count)), done + (partitions - 1) * keep


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
        keep = evictor.kept_per_partition(true, counts[row])
        for head in range(3):
            wanted, _ = slow(keys[row, head, pad:], values[row, head, pad:], sinks, lag, keep, variant, sinks)
            if selection is None:
                assert wanted == list(range(true))
                continue
            real = selection.indices.shape[-1] if selection.lengths is None else selection.lengths[row]
            assert (selection.indices[row, head, -real:] - pad).tolist() == wanted


@pytest.mark.parametrize("budget", ["30%", "50%", "90%"])
def test_what_is_left_follows_equation_12(budget):
    evictor = LagKV(budget=budget, sinks=4, lag=16)
    for length in (64, 100, 211):
        keys = torch.randn(1, 1, length, 4)
        ctx = context(torch.zeros(1, 1, 1, 4), keys)
        asked = evictor.budget.entries(length, evictor.minimum)
        keep = evictor.kept_per_partition(length, asked)
        left = 4 + keep * ((length - 4) // 16 - 1) + 16 + (length - 4) % 16
        selection = evictor.select(ctx, (asked,))
        assert (length if selection is None else selection.indices.shape[-1]) == left <= asked
        # One more per partition would be over the budget, unless whole partitions stay.
        assert keep == 16 or left + (length - 4) // 16 - 1 > asked


def test_scaling_a_channel_changes_nothing():
    keys, values = V4["keys"], V4["values"]
    factor, shift = torch.tensor([2.0, 0.5, 7.0, 1.0]), torch.tensor([0.0, 3.0, -1.0, 9.0])
    evictor = LagKV(budget=15, sinks=2, lag=5)
    scaled = context(V4["query"], keys * factor + shift, values=values * factor - shift)
    assert kept(evictor, scaled) == kept(evictor, context(**V4))


def test_a_constant_channel_gives_numbers():
    # (30 - 10) // 3 partitions keep 6 each, beside the last partition of 10.
    keys = torch.randn(1, 1, 40, 4)
    keys[..., 2] = 1.0
    assert len(kept(LagKV(budget=30, sinks=0, lag=10), context(torch.zeros(1, 1, 1, 4), keys))[0]) == 28


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.float64)


def test_decoding_goes_on_compressing(model):
    ids = torch.randint(2, 120, (1, 50), generator=torch.Generator().manual_seed(2))
    plan = kvsieve.plan("lagkv", budget="60%", sinks=2, lag=8)
    keep = plan.evict.kept_per_partition(50, 30)
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    seen = 50 + 59
    left = 2 + keep * ((seen - 2) // 8 - 1) + 8 + (seen - 2) % 8
    assert result.cache.entries() == [left] * len(result.cache.layers)
    assert result.stats.applied and max(result.stats.kv_entries) <= 30


def test_what_is_kept_does_not_depend_on_how_it_came(model):
    """Feeding the same keys and values in any chunks keeps the same: the first layer's do not depend on eviction."""
    ids = torch.randint(2, 120, (1, 90), generator=torch.Generator().manual_seed(4))
    found = []
    for chunk in (None, 7, 16, 40):
        plan = kvsieve.plan("lagkv", budget="50%", sinks=3, lag=8, chunks=True)
        with kvsieve.attach(model, plan) as sieve:
            cache = sieve.prefill(ids, chunk=chunk)
        found.append(cache.sieve_layers[0].store.index.tolist())
    assert all(each == found[0] for each in found[1:])
    assert len(found[0][0][0]) == 3 + 4 * (87 // 8 - 1) + 8 + 87 % 8


def test_rows_of_a_batch_and_beams_go_their_own_way(model):
    ids = torch.randint(2, 120, (2, 50), generator=torch.Generator().manual_seed(6))
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
