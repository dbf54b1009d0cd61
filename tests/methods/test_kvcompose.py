"""KVCompose: scores by a second reading, composite tokens, and layers that share one budget."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import KVCompose
from layers import context
from scored import columns, read
from spying import seen_by_attention, softmax_rows
from tiny import padded_prompt

PADDING = 9
OPTIONS = {"chunk_length": 16}


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(41, PADDING, seed=0)


def slow_scores(model, ids):
    """[layers][H][N] scores of a prompt [N], from the definition, without kvsieve."""
    n, out = len(ids), []
    with seen_by_attention(model) as seen, torch.no_grad():
        model(torch.cat([ids, ids])[None])
        for _, (query, keys) in sorted(seen.items()):
            heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
            best = []
            for head in range(query.shape[1]):
                scale = query.shape[-1] ** -0.5
                rows = softmax_rows(query[0, head, n:], keys[0, head // groups], scale, lambda t, j: j <= n + t)
                best.append([max(row[j] for row in rows) for j in range(n)])
            own = [
                [sum(best[head * groups + member][j] for member in range(groups)) / groups for j in range(n)]
                for head in range(heads)
            ]
            mean = [sum(column) / heads for column in zip(*own, strict=True)]
            out.append([[one + more for one, more in zip(head, mean, strict=True)] for head in own])
    return out


def slow_kept(scores, budget):
    layers, heads, n = len(scores), len(scores[0]), len(scores[0][0])
    order = [[sorted(range(n), key=lambda j, head=head: (-head[j], j)) for head in layer] for layer in scores]
    rows = [[sum(scores[i][h][order[i][h][j]] for h in range(heads)) / heads for j in range(n)] for i in range(layers)]
    rows[0] = [max(layer[j] for layer in rows) for j in range(n)]
    every = [(i, j) for i in range(layers) for j in range(n)]
    ranked = sorted(every, key=lambda at: (at[1] > 0, -rows[at[0]][at[1]], at))
    sizes = [sum(i == layer for i, _ in ranked[: budget * layers]) for layer in range(layers)]
    return [[sorted(head[:size]) for head in layer] for layer, size in zip(order, sizes, strict=True)]


def test_kept_entries_equal_the_slow_reference_in_a_padded_batch(model, prompts):
    ids, mask = prompts
    plan = kvsieve.plan("kvcompose", budget="40%", **OPTIONS)
    caches = [read(model, plan, ids, mask), read(model, plan, ids, mask, chunk=11)]
    for row, pad in enumerate((0, PADDING)):
        true = ids[row, pad:]
        wanted = slow_kept(slow_scores(model, true), int(0.4 * len(true)))
        assert columns(read(model, plan, true[None]), 0) == wanted
        shifted = [[[j + pad for j in head] for head in layer] for layer in wanted]
        assert all(columns(cache, row) == shifted for cache in caches)
        sizes = [len(layer[0]) for layer in wanted]
        assert sum(sizes) == int(0.4 * len(true)) * len(wanted) and len(set(sizes)) > 1


def test_composite_tokens_by_hand():
    # Heads' own entries in order score 5 4 1 and 3 2 1 in the first layer: rows 4, 3, 1; the second layer's rows are
    # 3.5, 2, 2, so that the first layer's count as 4, 3, 2.
    layers = {
        0: (torch.tensor([[[1.0, 5, 4], [3, 1, 2]]]), torch.tensor([[4.0, 3, 1]]), (3,)),
        1: (torch.tensor([[[2.0, 4, 2], [2, 2, 3]]]), torch.tensor([[3.5, 2, 2]]), (3,)),
    }
    for count, sizes in ((1, (1, 1)), (2, (3, 1))):
        chosen = KVCompose._choose(layers, (count,))
        found = tuple(chosen[i].indices.shape[-1] if i in chosen else 3 for i in (0, 1))
        assert found == sizes
    assert KVCompose._choose(layers, (1,))[0].indices.tolist() == [[[1], [0]]]


def test_scores_by_hand():
    """One head; keys 1-D: two entries, two tokens read again in two passes."""
    keys = torch.zeros(1, 1, 4, 1, dtype=torch.float64)
    query = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    scores = {}
    evictor = KVCompose(budget=1)
    for seen in (3, 4):
        evictor._score(scores, context(query, keys[:, :, :seen], scale=1.0))
    # Three entries share the first query's attention, four the second's.
    assert torch.allclose(scores[0], torch.full((1, 1, 2), 1 / 3, dtype=torch.float64))


def test_protected_tokens_stay(model, prompts):
    ids = prompts[0][:1]
    with kvsieve.attach(model, kvsieve.plan("kvcompose", budget="30%", **OPTIONS)) as sieve:
        cache = sieve.prefill(ids, protect=[(10, 14)])
    assert all({10, 11, 12, 13} <= set(head) for layer in columns(cache, 0) for head in layer)


def test_a_later_turn_reads_the_conversation_again(model, prompts):
    ids = prompts[0][:1]
    with kvsieve.attach(model, kvsieve.plan("kvcompose", budget="40%", **OPTIONS)) as sieve:
        first = sieve.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
        more = torch.cat([first.sequences, ids[:, -6:]], 1)
        cache = sieve.prefill(more, cache=first.cache)
    sizes = [len(layer[0]) for layer in columns(cache, 0)]
    assert sum(sizes) == int(0.4 * more.shape[1]) * len(sizes)


def test_wrong_parameters_are_refused():
    with pytest.raises(PlanError, match="chunk_length must be a whole number of at least 1, got 0"):
        KVCompose(budget=4, chunk_length=0)
    with pytest.raises(PlanError, match="skip_layers must be"):
        KVCompose(budget=4, skip_layers="x")
