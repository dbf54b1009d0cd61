"""EntropyGatedChunkKV: which chunks are spiky, and what is taken of them."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import EntropyChunkKV, SnapKV
from layers import kept
from scored import F64, Given, given
from tiny import padded_prompt, tiny_model


def slow(total, count, chunk, spiky):
    """Kept tokens of a row, by the definition's steps; total: scores summed over heads."""
    chunks = [range(start, min(start + chunk, len(total))) for start in range(0, len(total), chunk)]
    means = [sum(total[j] for j in part) / len(part) for part in chunks]
    spread = []
    for part in chunks:
        least = min(0, *(total[j] for j in part))
        shifted = [total[j] - least for j in part]
        shares = [one / (sum(shifted) + 1e-8) for one in shifted]
        h = -sum(share * math.log(share + 1e-8) for share in shares)
        spread.append(min(max(h / math.log(len(part)), 0), 1) if len(part) > 1 else 0.0)
    low, flat = statistics.median_low(means), statistics.median_low(spread)
    found = []
    for at in sorted(range(len(chunks)), key=lambda at: (-means[at], at)):
        room = count - len(found)
        size = min(len(chunks[at]), room)
        if means[at] >= low and spread[at] < flat:
            size = min(size, spiky)
        found += sorted(chunks[at], key=lambda j: (-total[j], j))[:size]
    left = sorted(set(range(len(total))) - set(found), key=lambda j: (-total[j], j))
    return sorted(found + left[: count - len(found)])


def test_by_hand():
    # Chunks of 4: an even one of mean 3, a spiky one of mean 5, two even ones of mean 1 and 2.
    scores = [[3, 3, 3, 3, 0, 20, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    ctx = given([scores])
    entropy = {"base": Given(budget=5), "chunk_length": 4, "spiky_length": 1}
    # One token of the spiky chunk, then the first chunk.
    assert kept(EntropyChunkKV(**entropy), ctx) == [[0, 1, 2, 3, 5]]
    assert kept(EntropyChunkKV(**{**entropy, "base": Given(budget=7)}), ctx) == [[0, 1, 2, 3, 5, 12, 13]]
    # All chunks are taken; the spiky one's other tokens fill up.
    assert kept(EntropyChunkKV(**{**entropy, "base": Given(budget=14)}), ctx) == [[*range(6), *range(8, 16)]]
    # The best tokens of the last chunk taken stay, not the first ones.
    ctx.shared["scores"][0, 0, :4] = torch.tensor([3.0, 2.9, 3.0, 3.1])
    assert kept(EntropyChunkKV(**{**entropy, "base": Given(budget=3)}), ctx) == [[0, 3, 5]]


@pytest.mark.parametrize(("chunk", "spiky"), [(2, 1), (6, 2), (10, 4)])
@pytest.mark.parametrize("signed", [False, True])
def test_it_equals_the_slow_reference_in_padded_batches(chunk, spiky, signed):
    scores = torch.randn(2, 3, 63, dtype=F64, generator=torch.Generator().manual_seed(chunk))
    scores = scores if signed else scores.exp()
    ctx = given(scores, padding=[0, 17])
    for row, pad in enumerate([0, 17]):
        for share in (0.2, 0.5, 0.9):
            evictor = EntropyChunkKV(base=Given(budget=share), chunk_length=chunk, spiky_length=spiky)
            wanted = slow(scores[row, :, pad:].sum(0).tolist(), int(share * (63 - pad)), chunk, spiky)
            assert kept(evictor, ctx, row) == [[pad + j for j in wanted]] * 3


def test_protected_entries_stay_apart():
    ctx = given([[[math.inf, 1, 2, 3, 9, 9, 9, 9, 1, 2, 3, math.inf]]])
    assert kept(EntropyChunkKV(base=Given(budget=6), chunk_length=4, spiky_length=1), ctx) == [[0, 4, 5, 6, 7, 11]]


def test_wrong_parameters_are_refused():
    with pytest.raises(PlanError, match="spiky_length must be less than chunk_length=4, got 4"):
        EntropyChunkKV(base=Given(budget=4), chunk_length=4, spiky_length=4)
    with pytest.raises(PlanError, match="chunk_length must be a whole number of at least 2, got 1"):
        EntropyChunkKV(base=Given(budget=4), chunk_length=1)


def test_a_model_keeps_the_budget_and_padded_rows_equal_rows_alone():
    ids, mask = padded_prompt(50, 9)
    base = SnapKV(budget="40%", window=4, kernel=3)
    with kvsieve.attach(tiny_model(), kvsieve.Plan(evict=EntropyChunkKV(base=base, chunk_length=6))) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
    assert alone.entries() == [16] * 4
    for both, one in zip(together.layers, alone.layers, strict=True):
        assert (both.store.index[1:, :, -16:] - 9).tolist() == one.store.index.tolist()
