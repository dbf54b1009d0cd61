"""CORM and thresholds: heads that keep as many entries as a rule gives."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import CORM, KNorm, Threshold
from layers import context
from small import stored
from stepped import run
from tiny import tiny_prompt


def slow(query, keys, prompt, queries, recent, count=None):
    """Tokens of one KV head after the prompt and each further token, by the definition."""
    kept, last, after = list(range(prompt)), {}, []
    for token in range(query.shape[1]):
        if token >= prompt:
            kept.append(token)
        seen = [other for other in kept if other <= token]
        weights = (query[:, token] @ keys[seen].T * keys.shape[-1] ** -0.5).softmax(-1).amax(0).tolist()
        last |= {other: token + 1 for other, weight in zip(seen, weights, strict=True) if weight * (token + 1) >= 1}
        if token < prompt - 1:
            continue
        now = token + 1
        kept = [
            other for other in kept if other >= now - recent or last.get(other, 0) > now - queries
        ]  # recent: of the stored ones, which are the last tokens
        if count is not None and len(kept) > count:
            old = sorted(kept[:-recent], key=lambda other: (-last[other], other))[: count - recent]
            kept = sorted([*old, *kept[-recent:]])
        after.append(list(kept))
    return after


@pytest.mark.parametrize(("groups", "count"), [(1, None), (2, None), (2, 13)])
def test_equals_the_slow_reference(groups, count):
    make = torch.Generator().manual_seed(groups)
    query = torch.randn(2 * groups, 70, 8, generator=make, dtype=torch.float64) * 3
    keys = torch.randn(2, 70, 8, generator=make, dtype=torch.float64)
    evictor = CORM(budget="100%" if count is None else count, queries=3, recent=4)
    found = run(evictor, query, keys, 40, 70 if count is None else count)
    sizes = set()
    for head in range(2):
        expected = slow(query[head * groups : (head + 1) * groups], keys[head], 40, 3, 4, count)
        for step, own in enumerate(expected):
            assert found[step][head] == own
            sizes.add(len(own))
    assert len(sizes) > 2 and (count is None or max(sizes) <= count)


def test_chunks_and_padding_change_nothing(model):
    ids = tiny_prompt(2, 40, seed=5)
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    options = {"max_new_tokens": 21, "min_new_tokens": 21, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with kvsieve.attach(model, kvsieve.plan("corm:floor=0:queries=4:recent=3")) as sieve:
        whole = sieve.generate(ids, mask, **options)
        parts = sieve.generate(ids, mask, chunk=7, **options)
        alone = sieve.generate(ids[1:, 9:], **options)
    kept = stored(whole.cache, [0, 9])
    assert torch.equal(whole.sequences, parts.sequences) and stored(parts.cache, [0, 9]) == kept
    assert stored(alone.cache)[0] == kept[1]
    sizes = {len(head) for row in kept for layer in row for head in layer}
    assert len(sizes) > 2 and max(sizes) < 50


def test_a_floor_keeps_short_prompts_whole(model):
    ids = tiny_prompt(1, 40, seed=5)
    with kvsieve.attach(model, kvsieve.plan("corm:queries=4:recent=3:floor=40")) as sieve:
        assert set(sieve.prefill(ids).entries()) == {40}


def test_threshold_by_hand():
    # Key norms: 5, 1, 2, 1, 3; the other head's: 1, 1, 9, 9, 9.
    keys = torch.zeros(1, 2, 5, 2)
    keys[0, :, :, 0] = torch.tensor([[5.0, 1, 2, 1, 3], [1, 1, 9, 9, 9]])
    ctx = context(torch.zeros(1, 2, 5, 2), keys)

    def tokens(budget, counts, **options):
        evictor = Threshold(base=KNorm(budget=budget), threshold=-2.0, **options)
        selection = evictor.select(ctx, (counts,))
        sizes = selection.head_lengths[0] if selection.head_lengths else [selection.indices.shape[-1]] * 2
        return [selection.indices[0, head, -size:].tolist() for head, size in enumerate(sizes)]

    assert tokens(1.0, 5, recent=1) == [[1, 2, 3, 4], [0, 1, 4]]
    assert tokens(3, 3, recent=1) == [[1, 3, 4], [0, 1, 4]]
    assert tokens(3, 3, recent=2) == [[1, 3, 4], [0, 3, 4]]
    assert Threshold(base=KNorm(budget=1.0), threshold=-9.0, recent=1).select(ctx, (5,)) is None


def test_threshold_on_a_model(model):
    ids = tiny_prompt(1, 40, seed=5)
    options = {"max_new_tokens": 21, "min_new_tokens": 21, "do_sample": False}
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        norms = sieve.prefill(ids).sieve_layers[0].store.keys[0].norm(dim=-1)
    limit = float(norms.median())
    plan = kvsieve.plan("threshold", base="knorm", threshold=-limit, recent=4, floor=0, every=1)
    with kvsieve.attach(model, plan) as sieve:
        first = stored(sieve.prefill(ids))[0][0]
        cache = sieve.generate(ids, **options).cache
        keys = cache.sieve_layers[0].store
    for head, own in enumerate(first):
        assert own == [token for token in range(40) if token >= 36 or norms[head, token] <= limit]
    assert {len(head) for layer in stored(cache)[0] for head in layer} != {60}
    assert keys.index.shape[-1] < 60


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("corm", {"queries": 0}),
        ("corm", {"recent": 0}),
        ("corm", {"budget": 256}),
        ("threshold", {}),
        ("threshold", {"threshold": "x"}),
        ("threshold", {"threshold": 0.1, "recent": 0}),
        ("threshold", {"threshold": 0.1, "budget": 100}),
        ("threshold", {"threshold": 0.1, "base": "chunkkv"}),
    ],
)
def test_bad_parameters_are_refused(name, given):
    with pytest.raises(PlanError):
        kvsieve.plan(name, **given)
