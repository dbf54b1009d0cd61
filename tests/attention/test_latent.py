"""Latent attention equals attention over the keys and values that a model makes of its latents."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, asking, latent_attention
from kvsieve import attention
from kvsieve.attention import AttentionRequest, Latents, UpProjection
from kvsieve.attention import latent as latent_module
from reference import reference_attention

RANK, ROTATED, PLAIN, WIDTH, HEADS, LENGTH = 12, 4, 6, 5, 3, 19
TERMS = [None, AttentionTerms(0.7, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))]


def up_projection(rotated_first=False):
    torch.manual_seed(1)
    keys = torch.randn(HEADS, PLAIN, RANK, dtype=torch.float64)
    return UpProjection(keys, torch.randn(HEADS, WIDTH, RANK, dtype=torch.float64), rotated_first)


def inputs(new):
    torch.manual_seed(new)
    query = torch.randn(2, HEADS, new, PLAIN + ROTATED, dtype=torch.float64)
    return query, torch.randn(2, 1, LENGTH, RANK + ROTATED, dtype=torch.float64)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rotated_first", [False, True])
def test_an_entry_expands_to_its_heads_keys_and_values(rotated_first):
    up, (_, entries) = up_projection(rotated_first), inputs(1)
    keys, values = up.expand(entries)
    latent, turned = entries[1, 0, 7, :RANK], entries[1, 0, 7, RANK:]
    parts = [turned, up.keys[2] @ latent] if rotated_first else [up.keys[2] @ latent, turned]
    close(keys[1, 2, 7], torch.cat(parts))
    close(values[1, 2, 7], up.values[2] @ latent)
    for whole, part in zip((keys, values), up.expand(entries, slice(1, 3)), strict=True):
        close(part, whole[:, 1:3])


@pytest.mark.parametrize("rotated_first", [False, True])
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "terms"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("new", [1, 2, LENGTH])
def test_latent_attention(new, padded, terms, rotated_first, monkeypatch):
    up, (query, entries) = up_projection(rotated_first), inputs(new)
    valid = None
    if padded:
        valid = torch.ones(2, 1, LENGTH, dtype=torch.bool)
        valid[1, :, :5] = False
    keys, values = up.expand(entries)
    expected = reference_attention(query, keys, values, scale=0.3, valid=valid, terms=terms)
    real = slice(5 if padded and new == LENGTH else 0, None)
    for elements in (1 << 26, 1):
        # At once, and head by head.
        monkeypatch.setattr(latent_module, "_ELEMENTS", elements)
        ours = latent_attention(query, entries, up, scale=0.3, valid=valid, terms=terms)
        close(ours[:, :, real], expected[:, :, real])


def test_few_queries_read_latents_and_many_expanded_keys():
    seen = []

    def spy(request):
        seen.append(request.stored.keys.shape[1:])
        return attention.attend(request)

    up, rows = up_projection(), latent_module.latent_rows(spy)
    for new in (1, LENGTH):
        query, entries = inputs(new)
        request = AttentionRequest(asking(query, 0.3), Latents(entries, up))
        next(row for row in rows if row.why_not(request) is None).run(request)
    assert seen == [(1, LENGTH, RANK + ROTATED), (HEADS, LENGTH, PLAIN + ROTATED)]
