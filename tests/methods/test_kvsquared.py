"""KV²: what is fed again, and what is kept, against the definition in plain loops."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import KVSquared
from kvsieve.methods.kvsquared import unlike_chunk
from layers import context
from scored import best, columns, moved
from spying import note_largest, seen_by_attention
from tiny import padded_prompt, tiny_model, tiny_prompt

CHUNK, PREFIX, PADDING = 16, 3, 9


def unlike(keys, start, end):
    """KeyDiff's scores of a chunk, mean over layers and heads."""
    total = torch.zeros(end - start, dtype=torch.float64)
    for layer in keys:
        for head in layer:
            directions = [key / key.norm() for key in head[start:end]]
            mean = sum(directions) / len(directions)
            total += torch.stack([-(one @ mean) / mean.norm() for one in directions]).double()
    return (total / sum(map(len, keys))).tolist()


def slow_scores(model, ids, share):
    """[layers][H][N] scores of a prompt [N] of which `share(chunk)` tokens of a chunk are fed again."""
    n, out = len(ids), {}
    with seen_by_attention(model) as seen, torch.no_grad():
        model(ids[None])
        stored = [keys[0] for _, (_, keys) in sorted(seen.items())]
        for start in range(0, n, CHUNK):
            end = min(start + CHUNK, n)
            chosen = [start + j for j in best(unlike(stored, start, end), share(end - start))]
            model(torch.cat([ids, ids[chosen]])[None])

            def visible(t, j, start=start, end=end):
                return j < PREFIX or start <= j < end or n <= j <= n + t

            note_largest(out, seen, n, range(start, end), visible)
    return [out[layer] for layer in sorted(out)]


@pytest.mark.parametrize("fed_share", [None, 0.2])
def test_kept_entries_equal_the_slow_reference_in_a_padded_batch(fed_share):
    model = tiny_model()
    ids, mask = padded_prompt(53, PADDING)
    plan = kvsieve.plan("kvsquared", budget="40%", floor=0, chunk_length=CHUNK, prefix=PREFIX, fed_share=fed_share)
    with kvsieve.attach(model, plan) as sieve:
        together = [sieve.prefill(ids, mask), sieve.prefill(ids, mask, chunk=11)]
        alone = [sieve.prefill(ids[:1]), sieve.prefill(ids[1:, PADDING:])]
    for row, pad in enumerate((0, PADDING)):
        length, budget = 53 - pad, int(0.4 * (53 - pad))

        def share(chunk, length=length, budget=budget):
            return max(1, chunk * budget // length if fed_share is None else int(chunk * fed_share))

        scores = slow_scores(model, ids[row, pad:], share)
        flat = [value if j >= PREFIX else 2.0 for layer in scores for head in layer for j, value in enumerate(head)]
        kept = best(flat, budget * 8)
        heads = [[at % length for at in kept if at // length == head] for head in range(8)]
        wanted = [heads[at : at + 2] for at in range(0, 8, 2)]
        assert columns(alone[row]) == wanted
        assert all(columns(cache, row) == moved(wanted, pad) for cache in together)


def test_keys_are_compared_within_their_chunk():
    keys = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 5.0], [0.0, 1.0]], dtype=torch.float64)
    keys = keys.view(1, 1, 6, 2)
    ctx = context(keys, keys, padding=[1], num_layers=1)
    scores, real = unlike_chunk(ctx, torch.tensor([[-1, 0, 0, 0, 1, 1]]))
    # The first chunk's mean direction is (2, 1) / sqrt(5).
    assert real.tolist() == [[[False, True, True, True, True, True]]]
    wanted = torch.tensor([[[0, -2 / 5**0.5, -1 / 5**0.5, -2 / 5**0.5, -1, -1]]], dtype=torch.float64)
    torch.testing.assert_close(scores, wanted)


def test_a_later_turn_keeps_the_budget_of_the_conversation():
    model, ids = tiny_model(), tiny_prompt(size=70)
    plan = kvsieve.plan("kvsquared", budget="30%", floor=0, chunk_length=CHUNK, uniform=True)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids[:, :50])
        before = columns(cache)
        assert cache.entries() == [15] * 4
        cache = sieve.prefill(ids, cache=cache)
    assert cache.entries() == [21] * 4
    for old, new in zip(before, columns(cache), strict=True):
        assert all({j for j in now if j < 50} <= set(then) for then, now in zip(old, new, strict=True))


def test_probing_is_shared_where_the_same_tokens_are_fed():
    by_budget = [
        KVSquared(budget=budget, uniform=uniform) for budget, uniform in ((20, True), (20, False), (30, False))
    ]
    first, second, third = (evictor.probe_identity for evictor in by_budget)
    assert first == second != third
    assert KVSquared(budget=20, fed_share=0.1).probe_identity == KVSquared(budget=9, fed_share=0.1).probe_identity
    assert not by_budget[0].lacks_tokenizer


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"fed_share": 0.0}, "fed_share must be a share"),
        ({"fed_share": 1.5}, "fed_share must be a share"),
        ({"budget": 4}, "the prefix of 4 and one more"),
        ({"chunk_length": 0}, "chunk_length must be a whole number of at least 1"),
    ],
)
def test_wrong_parameters_are_refused(wrong, match):
    with pytest.raises(PlanError, match=match):
        kvsieve.plan("kvsquared", **wrong)
