"""A few new tokens attended to in one call of the C kernel, all queries of a KV head together."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, asking, dense_attention
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
