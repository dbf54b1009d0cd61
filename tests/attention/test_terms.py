"""Capped logits and sinks mean the same on every path of attention as in its definition."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, asking, dense_attention, masked_attention, ragged_attention, sparse_attention
from kvsieve.attention import AttentionRequest, DenseEntries, blocked
from kvsieve.attention import masked as masked_module
from kvsieve.cache import DenseStore, keep
from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.core.selection import pack_ragged
from reference import reference_attention

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -4.0], dtype=torch.float64)
EACH_TERM = {
    "softcap": AttentionTerms(softcap=0.7),
    "sinks": AttentionTerms(sinks=SINKS),
    "both": AttentionTerms(0.7, SINKS),
}

each_term = pytest.mark.parametrize("terms", EACH_TERM.values(), ids=EACH_TERM.keys())
each_padding = pytest.mark.parametrize("padding", [None, "rows", "heads"])


def inputs(new, length=19):
    torch.manual_seed(new)
    query = torch.randn(2, 6, new, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 2, length, 8, dtype=torch.float64)
    return query, keys, values


def real(padding, length=19):
    if padding is None:
        return None
    valid = torch.rand(2, 1 if padding == "rows" else 2, length) > 0.3
    valid[1, :, :4] = False
    return valid


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@each_term
def test_the_definition_by_hand(terms):
    query, keys, values = inputs(1)
    logits = (query[1, 4] @ keys[1, 1].T * 0.3)[0]
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    weights = logits.exp()
    total = weights.sum() + (0 if terms.sinks is None else SINKS[4].exp())
    close(reference_attention(query, keys, values, scale=0.3, terms=terms)[1, 4, 0], weights / total @ values[1, 1])


@each_term
@each_padding
@pytest.mark.parametrize("new", [1, 6, 19], ids=lambda n: f"L{n}")
def test_dense(new, padding, terms):
    query, keys, values = inputs(new)
    valid = real(padding)
    ours = dense_attention(query, keys, values, scale=0.3, valid=valid, terms=terms)
    theirs = reference_attention(query, keys, values, scale=0.3, valid=valid, terms=terms)
    assert ours.isfinite().all()
    if padding == "rows" and new > 1:
        # What padding itself attends to is nobody's concern.
        asked = valid[:, 0, -new:]
        ours, theirs = (part.transpose(1, 2)[asked] for part in (ours, theirs))
    close(ours, theirs)


@each_term
@each_padding
def test_blocks_of_queries(padding, terms, monkeypatch):
    monkeypatch.setattr(blocked, "_ELEMENTS", 1)  # blocks of 16 queries, the fewest
    query, keys, values = inputs(37, 50)
    valid = real(padding, 50)
    ours = blocked.blocked_attention(AttentionRequest(asking(query, 0.3, terms), DenseEntries(keys, values, valid)))
    close(ours, reference_attention(query, keys, values, scale=0.3, valid=valid, terms=terms))


@pytest.mark.parametrize("terms", [None, *EACH_TERM.values()], ids=["none", *EACH_TERM])
@pytest.mark.parametrize("new", [1, 37], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("heads", [1, 6], ids=lambda n: f"{n}-masks")
def test_any_mask(heads, new, terms, monkeypatch):
    monkeypatch.setattr(masked_module, "_ELEMENTS", 1)
    query, keys, values = inputs(new, 50)
    mask = torch.rand(2, heads, new, 50) > 0.5
    mask[..., 0] = True
    ours = masked_attention(query, keys, values, mask, scale=0.3, terms=terms)
    # The reference knows no such masks: it gets what each query sees and nothing else.
    for head in range(6):
        one = None if terms is None else AttentionTerms(terms.softcap, None if terms.sinks is None else SINKS[[head]])
        shared = slice(head // 3, head // 3 + 1)
        for at in range(new):
            seen = mask[:, min(head, heads - 1), at]
            for row in range(2):
                entries = seen[row].nonzero()[:, 0]
                mine = (part[row : row + 1, shared, entries] for part in (keys, values))
                asked = query[row : row + 1, head : head + 1, at : at + 1]
                theirs = reference_attention(asked, *mine, scale=0.3, terms=one)
                close(ours[row : row + 1, head : head + 1, at : at + 1], theirs)


@each_term
def test_a_mask_of_all_rows_or_queries(terms):
    query, keys, values = inputs(5)
    for shape in ((1, 1, 1, 19), (2, 1, 1, 19), (1, 6, 5, 19), (1, 1, 5, 19)):
        mask = torch.rand(shape) > 0.5
        mask[..., 3] = True
        ours = masked_attention(query, keys, values, mask, scale=0.3, terms=terms)
        close(ours, masked_attention(query, keys, values, mask.expand(2, 6, 5, 19), scale=0.3, terms=terms))


@each_term
def test_a_query_that_sees_nothing_is_finite(terms):
    query, keys, values = inputs(5)
    for each in (None, terms):
        mask = torch.zeros(1, 1, 1, 19, dtype=torch.bool)
        assert masked_attention(query, keys, values, mask, scale=0.3, terms=each).isfinite().all()


@each_term
def test_heads_of_different_lengths(terms):
    query, keys, values = inputs(1, 37)
    kept = torch.rand(2, 2, 37) > torch.tensor([0.2, 0.9])[:, None]
    kept[..., -1] = True
    full = DenseStore()
    full.append(keys, values, torch.arange(37)[None])
    ours = ragged_attention(query, *keep(full.clone(), pack_ragged(kept)).flat, scale=0.3, terms=terms)
    close(ours, reference_attention(query, keys, values, scale=0.3, valid=kept, terms=terms))


@each_term
@pytest.mark.parametrize("by", ["kv-head", "query-head"])
def test_chosen_entries(by, terms):
    query, keys, values = inputs(1, 37)
    kv_rows = KVRows(keys.reshape(-1, 8), values.reshape(-1, 8), None, torch.arange(4) * 37, 1, 37)
    entries = torch.rand(4, *((3,) if by == "query-head" else ()), 37).argsort(-1)[..., :9]
    ours = sparse_attention(
        query.view(4, 3, 8), kv_rows, Choice(entries), scale=0.3, terms=terms.per_kv_row(2, 2)
    ).view(2, 6, 1, 8)
    for head in range(6):
        mine = entries.view(2, 2, -1, 9)[:, head // 3, head % 3 if by == "query-head" else 0]
        theirs = (part[:, head // 3].gather(1, mine[..., None].expand(-1, -1, 8))[:, None] for part in (keys, values))
        one = AttentionTerms(terms.softcap, None if terms.sinks is None else SINKS[[head]])
        close(ours[:, [head]], reference_attention(query[:, [head]], *theirs, scale=0.3, terms=one))


@each_term
def test_a_blend_that_knows_the_shares_is_attention_over_everything(terms):
    """With each chosen set's true share, and the mean of the rest by their weights, nothing is estimated."""
    query, keys, values = inputs(1, 37)
    kv_rows = KVRows(keys.reshape(-1, 8), values.reshape(-1, 8), None, torch.arange(4) * 37, 1, 37)
    # One query head per KV head: the vector is the KV row's.
    terms = AttentionTerms(terms.softcap, None if terms.sinks is None else SINKS[:2])
    query = query[:, :2]
    logits = (query[:, :, 0, None] @ keys.mT * 0.3)[:, :, 0].flatten(0, 1)
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    weights = logits.softmax(-1)
    entries = torch.arange(9).expand(4, -1)
    share = weights[:, :9].sum(-1)
    rest = (weights[:, 9:, None] * values.flatten(0, 1)[:, 9:]).sum(1) / (1 - share)[:, None]
    choice = Choice(entries, (share[:, None], rest))
    ours = sparse_attention(query.reshape(4, 1, 8), kv_rows, choice, scale=0.3, terms=terms.per_kv_row(2, 2))
    close(ours.view(2, 2, 1, 8), reference_attention(query, keys, values, scale=0.3, terms=terms))


def test_queries_of_kv_rows():
    query = torch.randn(2, 6, 1, 8)
    rows = asking(query, 0.3, AttentionTerms(0.7, SINKS)).per_kv_row(heads=2)
    assert rows.softcap == 0.7 and rows.sinks.tolist() == [*SINKS.view(2, 3).tolist()] * 2
    some = rows.at(torch.tensor([3, 0]))
    assert some.sinks.tolist() == [SINKS[3:].tolist(), SINKS[:3].tolist()]
    assert torch.equal(some.query, torch.stack([query[1, 3:, 0], query[0, :3, 0]]))
