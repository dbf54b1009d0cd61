"""Methods rank entries by the weights that attention gives, with caps and sinks in them.

Keys are unit vectors here, so that a query is its own logits: those of a capped layer are then also those of a layer
without a cap and other queries, and a sink is also an entry that every query gives the same logit.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from attend import AttentionTerms, asking, sparse_attention
from kvsieve.core.kv_rows import KVRows
from kvsieve.lab.calibrate.heads import RetrievalScores
from kvsieve.methods import (
    CAKE,
    H2O,
    HSA,
    TOVA,
    TSP,
    ExactTopK,
    ExpectedAttention,
    Finch,
    Kascade,
    KVzip,
    Loki,
    Lookahead,
    PyramidInfer,
    Quest,
    SageKV,
    SnapKV,
    SparQ,
    ZigZagKV,
)
from kvsieve.methods.cake import CakeScores
from kvsieve.methods.h2o import received_mass
from kvsieve.methods.loki import LokiSetting
from kvsieve.methods.pyramidinfer import _tail_mass
from kvsieve.methods.readers import Setting
from layers import context

N, NEW, CAP = 24, 12, 1.5
SINKS = torch.tensor([6.0, -6.0, 1.0, 3.0], dtype=torch.float64)


def layer(logits, terms=None):
    """A layer of 4 query heads and 2 KV heads whose last queries have the logits [1, 4, L, N]."""
    keys = torch.eye(logits.shape[-1], dtype=torch.float64).expand(1, 2, -1, -1)
    ctx = context(logits, keys, values=torch.ones_like(keys), scale=1.0)
    ctx.softcap, ctx.sinks = terms or (None, None)
    return ctx


def kvzip(ctx, first=1):
    scores = {}
    tokens = torch.arange(N - NEW + first - 1)[None]
    KVzip(budget=8, prefix=first, chunk_length=N)._score(scores, tokens, first, ctx)
    return scores[0]


def lookahead(ctx):
    drafted = ctx.query[:, :, -4:-2].flip(2)
    ctx.state.update(lookahead=drafted, lookahead_real=torch.ones(1, 2, dtype=torch.bool))
    return Lookahead(budget=8, window=2, kernel=1).context_scores(ctx)


def expected_attention(ctx):
    ctx.model = SimpleNamespace(rotate=lambda layer_idx, x, positions, inverse=False: x)
    ctx.state.update(mean=ctx.query[:, :, -1])
    return ExpectedAttention(budget=8, sinks=0, use_covariance=False, use_vnorm=False).scores(ctx)


def cake(ctx):
    return CakeScores(budget=8, window=3, kernel=1).context_scores(ctx)


# What a method ranks entries by.
RANKS = {
    "snapkv": lambda ctx: SnapKV(budget=8, window=3, kernel=1).context_scores(ctx),
    "per-query-head": lambda ctx: SnapKV(budget=8, window=3, kernel=1, per_query_head=True).context_scores(ctx),
    "h2o": received_mass,
    "tova": lambda ctx: TOVA(budget=8).scores(ctx),
    "sagekv": lambda ctx: SageKV(budget=8, sinks=0, recent=0).ranks(ctx, (8,))[..., :-1],
    "cake": cake,
    "pyramidinfer": lambda ctx: _tail_mass(ctx, torch.ones(1, 5, dtype=torch.float64)),
    "lookahead": lookahead,
    "expectedattention": expected_attention,
    "kvzip": kvzip,
}


def retrieval(ctx):
    found = RetrievalScores()
    found.see(ctx, torch.arange(N)[None] % 5, torch.arange(4)[None])
    return found.beyond[0]


# What has no number per entry, or one that depends on how many there are.
DECISIONS = {
    "finch": lambda ctx: Finch(budget=8, question_tokens=3).scores(ctx),
    "cake-layers": lambda ctx: torch.tensor(CAKE(base=CakeScores(budget=8, window=3)).weigh(ctx)),
    "zigzagkv": lambda ctx: torch.tensor(ZigZagKV(base=SnapKV(budget=8, window=3)).weigh(ctx)),
    "fastkv": lambda ctx: TSP(rate=8, layer=0, window=3, kernel=1).select(ctx).indices,
    "pyramidinfer-tokens": lambda ctx: (
        PyramidInfer(rate=0.3, min_context=4).select(dataclasses.replace(ctx, layer_idx=2)).indices
    ),
    "h2o-kept": lambda ctx: H2O(budget=8).select(ctx, (8,)).indices,
    "calibrated-heads": retrieval,
}


def logits_of(scale=3.0):
    torch.manual_seed(3)
    return torch.randn(1, 4, NEW, N, dtype=torch.float64) * scale


# Expected Attention is refused where logits are capped.
@pytest.mark.parametrize("name", [*sorted(RANKS.keys() - {"expectedattention"}), *DECISIONS])
def test_capped_logits_are_those_that_count(name):
    numbers, logits = {**RANKS, **DECISIONS}[name], logits_of()
    capped = numbers(layer(logits, AttentionTerms(softcap=CAP)))
    torch.testing.assert_close(capped, numbers(layer(CAP * torch.tanh(logits / CAP))), atol=1e-12, rtol=1e-12)
    assert not torch.equal(capped, numbers(layer(logits)))


@pytest.mark.parametrize("name", RANKS)
def test_a_sink_takes_its_part_as_an_entry_would(name):
    numbers, logits = RANKS[name], logits_of()
    with_sinks = numbers(layer(logits, AttentionTerms(sinks=SINKS)))
    entry = SINKS[None, :, None, None].expand(-1, -1, NEW, 1)
    wider = layer(torch.cat([entry, logits], -1))
    as_entry = kvzip(wider, first=2) if name == "kvzip" else numbers(wider)
    torch.testing.assert_close(with_sinks, as_entry[..., 1:], atol=1e-12, rtol=1e-12)
    assert not torch.equal(with_sinks, numbers(layer(logits)))


# Readers that look at every channel of pages of one entry estimate nothing.
READERS = {
    "quest": (Quest(budget=16), Setting(4, 4, 1)),
    "hsa": (HSA(budget=16), Setting(4, 4, 1, N)),
    "sparq": (SparQ(budget=16), Setting(4, 4, 1, N)),
    "exacttopk": (ExactTopK(budget=16, per_group=True), Setting(4, 4)),
    "kascade": (Kascade(budget=16), Setting(4, 4)),
    "loki": (Loki(budget=16), LokiSetting(4, 4, 1, N, fitted=N)),
}


def chosen(name, logits, terms=None):
    """What a reader chooses of KV rows of unit vectors for queries [X, G, N]."""
    reader, setting = READERS[name]
    reader = dataclasses.replace(reader, newest=False)
    keys = torch.eye(N, dtype=torch.float64).repeat(len(logits), 1)
    kv_rows = KVRows(keys, keys, None, torch.arange(len(logits)) * N, 1, N)
    choice = reader.choose(asking(logits, 1.0, terms), kv_rows, {}, setting)
    return kv_rows, dataclasses.replace(choice, entries=choice.entries.sort(-1).values)


@pytest.mark.parametrize("name", READERS)
def test_readers_share_a_group_by_capped_weights(name):
    logits = logits_of()[0, :, :2]
    ours = chosen(name, logits, AttentionTerms(softcap=CAP))[1].entries
    assert torch.equal(ours, chosen(name, CAP * torch.tanh(logits / CAP))[1].entries)
    assert not torch.equal(ours, chosen(name, logits)[1].entries)


@pytest.mark.parametrize("name", READERS)
def test_a_query_head_whose_sink_takes_all_has_no_say(name):
    logits = torch.zeros(1, 2, N, dtype=torch.float64)
    logits[0, 0, 3:7], logits[0, 1, 11:15] = 9, 2
    assert chosen(name, logits)[1].entries.tolist() == [[3, 4, 5, 6]]
    sinks = torch.tensor([[30.0, -30.0]], dtype=torch.float64)
    assert chosen(name, logits, AttentionTerms(sinks=sinks))[1].entries.tolist() == [[11, 12, 13, 14]]


@pytest.mark.parametrize("terms", [AttentionTerms(CAP, SINKS[:2, None]), AttentionTerms(None, SINKS[:2, None])])
def test_what_sparq_blends_in_leaves_the_sink_its_part(terms):
    """Where all values are alike, so is their mean, and nothing is estimated but what is held."""
    logits = logits_of()[0, :2, :1]
    reader, setting = READERS["sparq"]
    keys, values = torch.eye(N, dtype=torch.float64).repeat(2, 1), torch.ones(2 * N, 3, dtype=torch.float64)
    kv_rows = KVRows(keys, values, None, torch.arange(2) * N, 1, N)
    choice = reader.choose(asking(logits, 1.0, terms), kv_rows, {}, setting)
    out = sparse_attention(logits, kv_rows, choice, scale=1.0, terms=terms)
    bent = logits if terms.softcap is None else CAP * torch.tanh(logits / CAP)
    held = bent.exp().sum(-1)
    torch.testing.assert_close(out, (held / (held + terms.sinks.exp()))[..., None].expand(-1, -1, 3))
    share = bent.softmax(-1)[:, 0].gather(1, choice.entries).sum(-1)
    torch.testing.assert_close(choice.blend[0][:, 0], share)
