"""A few new tokens attended to in one call of the C kernel, all queries of a KV head together."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, asking, by, dense_attention
from kvsieve.attention import AttentionRequest, FlatEntries, explain
from kvsieve.attention.reference import reference_attention
from kvsieve.kernels.cpu import prompt

# Batch, query heads, KV heads, new tokens, entries, channels of keys and of values.
SHAPES = [(1, 14, 2, 5, 900, 64, 64), (2, 9, 3, 3, 257, 64, 64), (1, 4, 2, 17, 17, 128, 128), (1, 4, 2, 9, 128, 96, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("terms", ["", "sinks", "cap"])
def test_few_tokens_in_one_call(shape, terms):
    if prompt.reason() is not None:
        pytest.skip(prompt.reason())
    batch, query_heads, heads, new, size, dim, wide = shape
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, new, query_heads, dim, generator=draw).bfloat16().transpose(1, 2)
    # Buffers have room for further entries.
    keys, values = (
        torch.randn(batch, heads, size + 9, part, generator=draw).bfloat16()[:, :, :size] for part in (dim, wide)
    )
    given = None
    if terms:
        given = AttentionTerms(30.0 if terms == "cap" else None, torch.randn(query_heads) if terms == "sinks" else None)
    scale = dim**-0.5
    assert prompt.why_not_few(query, keys, values, scale) is None
    found = prompt.few_attention(asking(query, scale, given), keys, values)
    exact = [part.float() for part in (query, keys, values)]
    wanted = dense_attention(*exact, scale=scale, terms=given)
    assert (found.float() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens_over_the_entries_of_each_head(shape):
    """Heads keep different numbers of entries; those of the new tokens lie in turns."""
    if prompt.reason() is not None:
        pytest.skip(prompt.reason())
    batch, query_heads, heads, new, size, dim, wide = shape
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, query_heads, new, dim, generator=draw).bfloat16()
    slots = size + new * heads
    # Half of each head's entries side by side, half of them scattered.
    owner = torch.randint(heads + 1, (batch, size), generator=draw)
    owner[:, : size // 2] = torch.arange(size // 2) * heads // max(size // 2, 1)
    owner = torch.cat([owner, torch.arange(new * heads).expand(batch, -1) % heads], 1)
    own = owner[:, None] == torch.arange(heads)[:, None]
    bias = torch.zeros(own.shape, dtype=torch.bfloat16).masked_fill_(~own, torch.finfo(torch.bfloat16).min)
    keys, values = (torch.randn(batch, slots, part, generator=draw).bfloat16() for part in (dim, wide))
    request = AttentionRequest(asking(query, dim**-0.5), FlatEntries(keys, values, bias, used=slots))
    found = by("C, few tokens", request)
    exact = FlatEntries(keys.float(), values.float(), bias.float(), used=slots)
    wanted = reference_attention(AttentionRequest(asking(query.float(), dim**-0.5), exact))
    assert (found.float() - wanted).norm() <= 4e-3 * wanted.norm()
    request.stored.padded = True
    assert "C, few tokens: some tokens are padding" in explain(request)
