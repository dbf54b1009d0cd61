"""KVzip: scores by hand and by a slow reference, exact totals, and that the question plays no part."""

from __future__ import annotations

import math

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import KVzip
from kvsieve.methods.repeating import repeat_requests
from layers import context
from scored import columns, read
from spying import note_largest, seen_by_attention
from tiny import padded_prompt
from toy_words import word_tokenizer

PADDING = 9
OPTIONS = {"chunk_length": 16, "prefix": 3, "repeat_ids": (5, 6), "go_on_ids": (7,), "answer_ids": (8, 9, 10)}


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(53, PADDING, seed=0)


def slow_scores(model, ids):
    """[layers][H][N] scores of a prompt [N], from the definition, without kvsieve."""
    n, out = len(ids), {}
    with seen_by_attention(model) as seen, torch.no_grad():
        for start in range(0, n, OPTIONS["chunk_length"]):
            end = min(start + OPTIONS["chunk_length"], n)
            asked = OPTIONS["go_on_ids"] if start else OPTIONS["repeat_ids"]
            fed = [*asked, *ids[max(0, start - 8) : start].tolist(), *OPTIONS["answer_ids"], *ids[start:end].tolist()]
            model(torch.cat([ids, torch.tensor(fed)])[None])

            def visible(t, j, start=start, end=end):
                return j < OPTIONS["prefix"] or start <= j < end or n <= j <= n + t

            note_largest(out, seen, n, range(start, end), visible)
    return [out[layer] for layer in sorted(out)]


def slow_kept(scores, budget, uniform):
    layers, heads, n = len(scores), len(scores[0]), len(scores[0][0])
    ranked = sorted(
        ((place, head, j) for place in range(layers) for head in range(heads) for j in range(n)),
        key=lambda at: (at[2] >= OPTIONS["prefix"], -scores[at[0]][at[1]][at[2]], at),
    )
    if uniform:
        ranked = [
            at for place in range(layers) for head in range(heads)
            for at in [each for each in ranked if each[:2] == (place, head)][:budget]
        ]  # fmt: skip
    else:
        ranked = ranked[: budget * layers * heads]
    return [
        [sorted(j for p, h, j in ranked if (p, h) == (place, head)) for head in range(heads)] for place in range(layers)
    ]


@pytest.mark.parametrize("uniform", [False, True], ids=["global", "uniform"])
def test_kept_entries_equal_the_slow_reference_in_a_padded_batch(model, prompts, uniform):
    ids, mask = prompts
    plan = kvsieve.plan("kvzip", budget="40%", uniform=uniform, **OPTIONS)
    caches = [read(model, plan, ids, mask), read(model, plan, ids, mask, chunk=11)]
    for row, pad in enumerate((0, PADDING)):
        true = ids[row, pad:]
        wanted = slow_kept(slow_scores(model, true), int(0.4 * len(true)), uniform)
        assert columns(read(model, plan, true[None]), 0) == wanted
        shifted = [[[j + pad for j in head] for head in layer] for layer in wanted]
        assert all(columns(cache, row) == shifted for cache in caches)
        assert sum(len(head) for layer in wanted for head in layer) == int(0.4 * len(true)) * len(wanted) * len(
            wanted[0]
        )
    if not uniform:
        assert len({len(head) for head in wanted[0]} | {len(head) for head in wanted[1]}) > 1


def test_what_is_kept_of_a_context_does_not_depend_on_the_question(model, prompts):
    ids = prompts[0][:1]
    plan = kvsieve.plan("kvzip", budget="40%", **OPTIONS)
    kept = columns(read(model, plan, ids[:, :40]), 0)
    for question in (ids[:, 40:44], ids[:, 48:]):
        with kvsieve.attach(model, plan) as sieve:
            result = sieve.generate(
                torch.cat([ids[:, :40], question], 1),
                question_tokens=question.shape[1],
                max_new_tokens=2,
                do_sample=False,
            )
        stored = columns(result.cache, 0)
        assert [[[j for j in head if j < 40] for head in layer] for layer in stored] == kept


def test_a_later_turn_keeps_the_budget_of_the_conversation(model, prompts):
    ids, mask = prompts
    plan = kvsieve.plan("kvzip", budget="40%", **OPTIONS)
    with kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids, mask, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        before = columns(first.cache, 0)
        more = torch.cat([first.sequences, ids[:, -6:]], 1)
        cache = sieve.prefill(more, torch.cat([mask, torch.ones_like(more[:, mask.shape[1] :])], 1), cache=first.cache)
    for row, pad in enumerate((0, PADDING)):
        stored = columns(cache, row)
        total = int(0.4 * (more.shape[1] - pad))
        assert sum(len(head) for layer in stored for head in layer) == total * len(stored) * len(stored[0])
    for old, new in zip(before, columns(cache, 0), strict=True):
        assert all({j for j in now if j < 53} <= set(then) for then, now in zip(old, new, strict=True))


def test_scores_of_a_chunk_by_hand():
    """One head; keys and queries 1-D. Prefix slot 0, chunk slots 2-3, slot 1 in another chunk, two tokens fed."""
    keys = torch.tensor([0.0, 9.0, math.log(2), 0.0, 0.0, math.log(3)], dtype=torch.float64).view(1, 1, 6, 1)
    query = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    ctx = context(query, keys, scale=1.0)
    scores = {}
    KVzip(budget=3, prefix=1, chunk_length=2)._score(scores, torch.tensor([[0, 1, 2, 3]]), 2, ctx)
    # The first fed token sees 1 + 2 + 1 and itself, 1: 5; the second also itself, 3: 8.
    assert torch.allclose(scores[0], torch.tensor([[[0, 0, 2 / 5, 1 / 5]]], dtype=torch.float64))


def test_requests_and_what_is_fed():
    tokenizer = word_tokenizer()
    made = repeat_requests(tokenizer)
    filled = kvsieve.plan("kvzip", answer_ids=()).for_tokenizer(tokenizer).evict
    assert (filled.repeat_ids, filled.go_on_ids, filled.answer_ids) == (made["repeat_ids"], made["go_on_ids"], ())
    tokens = torch.arange(100, 130)
    assert KVzip(budget=9, **OPTIONS).fed(tokens, 0).tolist() == [5, 6, 8, 9, 10, *range(100, 116)]
    assert KVzip(budget=9, **OPTIONS).fed(tokens, 16).tolist() == [7, *range(108, 116), 8, 9, 10, *range(116, 130)]
    assert KVzip(budget=9, **OPTIONS).fed(tokens, 32).tolist() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 4}, "at least 5 are needed"),
        ({"prefix": 0}, "prefix must be a whole number of at least 1"),
        ({"chunk_length": 0}, "chunk_length must be"),
        ({"repeat_ids": "12"}, "must be token ids"),
        ({"every": 3}, "no parameter 'every'"),
    ],
    ids=["budget", "prefix", "chunk", "ids", "every"],
)
def test_bad_parameters_are_refused(options, said):
    with pytest.raises(PlanError, match=said):
        kvsieve.plan("kvzip", **options)
