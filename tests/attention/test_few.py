"""A few new tokens attended to in one call of the C kernel, all queries of a KV head together."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, asking, by, dense_attention
from kvsieve.attention import AttentionRequest, DenseEntries, EncodedEntries, FlatEntries, executors, explain
from kvsieve.attention.reference import reference_attention
from kvsieve.cache import DenseStore, PackedStore
from kvsieve.kernels.cpu import prompt, token
from kvsieve.methods import KIVI

# Batch, query heads, KV heads, new tokens, entries, channels of keys and of values.
SHAPES = [
    (1, 14, 2, 5, 900, 64, 64),
    (2, 9, 3, 3, 257, 64, 64),
    (1, 4, 2, 17, 17, 128, 128),
    (1, 4, 2, 9, 128, 96, 64),
    (1, 6, 1, 1, 5000, 64, 80),
    (2, 14, 2, 1, 2049, 64, 64),
]


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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("groups", [3, 7])
@pytest.mark.parametrize("kind", ["dense", "flat"])
@pytest.mark.parametrize("size", [90, 2050, 4200])
def test_a_token_gets_the_same_numbers_beside_others_as_alone(size, kind, groups, threads):
    """Bit for bit, also where tokens begin a tile or a part of the entries: drafts change no answer."""
    if prompt.reason() is not None:
        pytest.skip(prompt.reason())
    new = 6
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, new, 64, generator=draw).bfloat16()
    keys, values = torch.randn(2, 2, 2, size, 64, generator=draw).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = by("C, few tokens", AttentionRequest(asking(query, 0.2), entries_of(kind, keys, values, new)))
        for at in range(new):
            seen = size - new + at + 1
            entries = entries_of(kind, keys[:, :, :seen], values[:, :, :seen], 1)
            alone = by("C, few tokens", AttentionRequest(asking(query[:, :, at : at + 1], 0.2), entries))
            assert torch.equal(together[:, :, at], alone[:, :, 0])
    finally:
        torch.set_num_threads(before)


def entries_of(kind, keys, values, new):
    """Entries [B, H, N, D] as a layer stores them, the last `new` of which are of new tokens."""
    batch, heads, size, dim = keys.shape
    if kind == "dense":
        return DenseEntries(keys, values)
    if kind == "flat":
        flat = [part.transpose(1, 2).reshape(batch, size * heads, dim) for part in (keys, values)]
        own = torch.arange(size * heads) % heads == torch.arange(heads)[:, None]
        bias = torch.zeros(own.shape, dtype=keys.dtype).masked_fill(~own, torch.finfo(keys.dtype).min)
        return FlatEntries(*flat, bias.expand(batch, -1, -1).contiguous(), used=size * heads)
    store = DenseStore()
    store.append(keys[:, :, :-new], values[:, :, :-new], torch.arange(size - new)[None], None)
    packed = PackedStore.build(store, KIVI(block=32, tail=16))
    packed.append(keys[:, :, -new:], values[:, :, -new:], torch.arange(size - new, size)[None], None)
    return EncodedEntries(packed)


@pytest.mark.skipif(token.built().reason is not None, reason="kernels are not compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "flat", "encoded"])
def test_values_that_are_not_finite_reach_no_earlier_token(kind, dtype):
    """As those of a draft that is rejected: C kernels give its tokens' values no part in the tokens before them."""
    draw = torch.Generator().manual_seed(0)
    keys, plain = (torch.randn(2, 2, 140, 64, generator=draw).to(dtype) for _ in range(2))
    query = torch.randn(2, 5, 6, 64, generator=draw).to(dtype).transpose(1, 2)
    found = []
    for number in (None, float("nan"), float("inf")):
        values = plain.clone()
        if number is not None:
            values[:, :, -2:, ::3] = number
        request = AttentionRequest(asking(query, 0.2), entries_of(kind, keys, values, 5))
        rows = [row for row in executors(request) if row.name.startswith("C") and row.why_not(request) is None]
        found.append({row.name: row.run(request) for row in rows})
    assert found[0]
    for name, wanted in found[0].items():
        for outs in found[1:]:
            assert torch.equal(outs[name][:, :, :3], wanted[:, :, :3]), name
            assert torch.equal(outs[name][..., 1::3], wanted[..., 1::3]), name
            assert not outs[name][:, :, -1, ::3].isfinite().any(), name
