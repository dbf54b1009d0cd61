"""Random Attention: which numbers are drawn, and that they are uniform and depend on the row alone."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.core.draws import drawn
from kvsieve.errors import PlanError
from kvsieve.methods import Random
from kvsieve.methods.base import positions
from layers import context, kept
from small import stored
from tiny import tiny_prompt

MASK = (1 << 64) - 1


def mixed(x):
    """SplitMix64 in Python's whole numbers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def number(seed, layer, head, position, length):
    key = mixed((mixed((mixed(seed) + layer) & MASK) + length) & MASK)
    bits = mixed((mixed((key + head) & MASK) + position) & MASK)
    return ((bits >> 41) + 0.5) / (1 << 23)


def made(length, padding=None, **options):
    keys = torch.zeros(len(padding or [0]), 3, length, 4)
    return context(keys, keys, padding=padding, **options)


def test_numbers_are_those_of_the_definition():
    assert mixed(0) == 0xE220A8397B1DCDAF  # The first output of SplitMix64 with seed 0.
    ctx = made(21, [0, 5], layer_idx=2)
    numbers = drawn(ctx, positions(ctx), 7)
    assert numbers.dtype == torch.float32
    for row, pad in enumerate([0, 5]):
        for head in range(3):
            expected = [number(7, 2, head, place, 21 - pad) for place in range(21 - pad)]
            assert numbers[row, head, pad:].tolist() == expected


def test_kept_entries_are_the_largest_numbers_and_the_recent_ones():
    for row, ours in enumerate(kept(Random(budget=9, recent=3, seed=7), made(21))):
        numbers = [number(7, 0, row, place, 21) for place in range(18)]
        best = sorted(range(18), key=lambda place: -numbers[place])[:6]
        assert ours == [*sorted(best), 18, 19, 20]


def test_the_sample_is_uniform():
    ctx = made(200)
    hits = torch.zeros(200)
    for seed in range(300):
        mask = drawn(ctx, positions(ctx), seed) > 0.75
        hits += mask.sum((0, 1))
    # 900 draws with a chance of 1/4 each: 225, and a deviation of 13.
    assert hits.sub(225).abs().max() < 60 and abs(hits.mean() - 225) < 5


def test_seeds_layers_and_heads_differ_and_a_padded_row_is_as_alone():
    evictor = Random(budget=8, recent=2)
    base = kept(evictor, made(30))
    assert len({tuple(head) for head in base}) == 3
    assert kept(Random(budget=8, recent=2, seed=1), made(30)) != base
    assert kept(evictor, made(30, layer_idx=1)) != base
    shifted = kept(evictor, made(41, [0, 11]), 1)
    assert [[slot - 11 for slot in head] for head in shifted] == base


def test_the_papers_setting_holds_its_budget(model):
    """K = 44 entries of 40 in the prompt, and the 4 newest ones: after an eviction there are 48."""
    ids = tiny_prompt(1, 40, seed=5)
    with kvsieve.attach(model, kvsieve.plan("random:budget=48:answer=remaining:recent=4:every=4")) as sieve:
        cache = sieve.generate(ids, max_new_tokens=41, min_new_tokens=41, do_sample=False).cache
    for layer in stored(cache)[0]:
        for head in layer:
            assert head[:40] == list(range(40)) and head[-4:] == [76, 77, 78, 79] and len(head) == 48
    assert len({tuple(head) for layer in stored(cache)[0] for head in layer}) > 4


@pytest.mark.parametrize("given", [{"recent": -1}, {"seed": -1}, {"budget": 64}, {"seed": "x"}])
def test_bad_parameters_are_refused(given):
    with pytest.raises(PlanError):
        kvsieve.plan("random", **given)
