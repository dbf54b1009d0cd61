"""Lookahead Q-Cache: the drafted queries' votes by hand and against a slow reference, in padded batches."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import Lookahead
from layers import context, kept
from spying import softmax_rows
from tiny import padded_prompt

PADDING = 9
WINDOW, KERNEL, DRAFTED = 5, 3, 4


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(61, PADDING, seed=1)


def votes(query, keys, scale, local, drafted):
    """[N - W] pooled votes of one KV head: query [G, N, D], keys [N, D], drafted [G, T, D]; plain loops."""
    n = len(keys)
    totals = []
    for mine, pseudo in zip(query, drafted, strict=True):
        rows = softmax_rows(pseudo, keys, scale, lambda t, j: True)
        if local:
            rows += softmax_rows(mine[n - WINDOW :], keys, scale, lambda t, j: j <= n - WINDOW + t)
        mass = [sum(row[j] for row in rows) for j in range(n - WINDOW)]
        totals.append([sum(mass[max(0, j - 1) : j + 2]) / KERNEL for j in range(len(mass))])
    return [sum(each) / len(totals) for each in zip(*totals, strict=True)]


def best(scores, count, n):
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: count - WINDOW]
    return sorted(ranked) + list(range(n - WINDOW, n))


@pytest.mark.parametrize("local", [True, False], ids=["with-window", "drafted-only"])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def test_votes_equal_the_slow_reference_in_padded_batches(groups, local):
    torch.manual_seed(groups)
    evictor = Lookahead(budget="40%", window=WINDOW, kernel=KERNEL, local=local)
    query = torch.randn(2, 2 * groups, 37, 8, dtype=torch.float64)
    keys = torch.randn(2, 2, 37, 8, dtype=torch.float64)
    drafted = torch.randn(2, 2 * groups, DRAFTED, 8, dtype=torch.float64)
    real = torch.tensor([[True] * 4, [True, True, False, False]])
    for row, pad in enumerate((0, PADDING)):
        ctx = context(query, keys, padding=[0, PADDING])
        ctx.state.update(lookahead=drafted, lookahead_real=real)
        wanted = []
        for head in range(2):
            group = slice(head * groups, (head + 1) * groups)
            pseudo = drafted[row, group, : int(real[row].sum())]
            scores = votes(query[row, group, pad:], keys[row, head, pad:], ctx.scale, local, pseudo)
            n = 37 - pad
            wanted.append([pad + j for j in best(scores, int(0.4 * n), n)])
        assert kept(evictor, ctx, row) == wanted
        assert not ctx.state


def test_one_drafted_query_by_hand():
    """W = 1, kernel 1: the drafted query points along the second key, the window's own to none; it keeps both and 5."""
    keys = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    keys[0, 0, 1, 0], keys[0, 0, 3, 0] = 2.0, 1.0
    ctx = context(torch.zeros(1, 1, 6, 2, dtype=torch.float64), keys, scale=1.0)
    ctx.state.update(lookahead=torch.tensor([[[[3.0, 0.0]]]]).double(), lookahead_real=torch.ones(1, 1).bool())
    assert kept(Lookahead(budget=3, window=1, kernel=1), ctx) == [[1, 3, 5]]


@pytest.mark.parametrize("draft", [None, 12], ids=["budget", "draft"])
def test_drafted_queries_are_those_of_snapkv_going_on(model, prompts, draft):
    """The queries of the steps after a SnapKV-reduced prompt, read off the model's projections, score all of it."""
    ids, mask = prompts
    options = {"window": WINDOW, "kernel": KERNEL}
    heads, size = model.config.num_attention_heads, model.config.hidden_size // model.config.num_attention_heads
    made = []
    with kvsieve.attach(
        model, kvsieve.plan("lookahead", budget=20, lookahead=DRAFTED, draft=draft, **options)
    ) as sieve:
        ours = sieve.prefill(ids, mask)
    for row, pad in enumerate((0, PADDING)):
        true = ids[row : row + 1, pad:]
        caught = {}
        handles = [
            layer.self_attn.q_proj.register_forward_hook(
                lambda module, args, out, index=index, caught=caught: caught.setdefault(index, []).append(out.detach())
            )
            for index, layer in enumerate(model.model.layers)
        ]
        with kvsieve.attach(model, kvsieve.plan("snapkv", budget=draft or 20, **options)) as sieve:
            sieve.generate(true, max_new_tokens=DRAFTED + 1, do_sample=False, eos_token_id=None)
            for handle in handles:
                handle.remove()
            n = true.shape[1]
            whole = {}
            for index, (prompt, *steps) in caught.items():
                queries = torch.cat([prompt, *steps], 1).unflatten(-1, (heads, size)).transpose(1, 2)
                whole[index] = sieve.facts.rotate(index, queries, torch.arange(n + DRAFTED)[None])
        with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
            full = sieve.prefill(true)
        for index, queries in whole.items():
            for head in range(full.layers[index].keys.shape[1]):
                groups = heads // full.layers[index].keys.shape[1]
                mine = queries[0, head * groups : (head + 1) * groups]
                scores = votes(mine[:, :n], full.layers[index].keys[0, head], size**-0.5, True, mine[:, n:])
                wanted = [pad + j for j in best(scores, 20, n)]
                assert ours.layers[index].store.index[row, head].tolist() == wanted
                made.append(wanted)
    assert len(made) == 2 * len(ours.layers) * ours.layers[0].keys.shape[1]


def test_a_draft_that_ends_votes_with_what_it_has(model, prompts):
    """With the first drafted token as an end, one query votes, as with a lookahead of 1."""
    ids, mask = prompts
    before = model.generation_config.eos_token_id
    full = model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)[:, -1]
    try:
        model.generation_config.eos_token_id = full.tolist()
        index = []
        for count in (1, 6):
            with kvsieve.attach(model, kvsieve.plan("lookahead", budget=20, lookahead=count, window=WINDOW)) as sieve:
                index.append([layer.store.index for layer in sieve.prefill(ids, mask).layers])
    finally:
        model.generation_config.eos_token_id = before
    assert all(torch.equal(one, six) for one, six in zip(*index, strict=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lookahead": 0}, "lookahead must be"),
        ({"draft": 10}, "at least 33 are needed"),
        ({"every": 4}, "leave every= out"),
        ({"local": 3}, "local must be True or False, got 3"),
    ],
    ids=["lookahead", "draft", "every", "local"],
)
def test_bad_parameters_are_refused(options, said):
    with pytest.raises(PlanError, match=said):
        kvsieve.plan("lookahead", **options)
