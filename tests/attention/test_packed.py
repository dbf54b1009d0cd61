"""Attention over encoded entries is that over what they decode to, by the compiled kernel and in plain torch."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, packed_attention
from codecs_of_tests import Formats
from kvsieve.cache import DenseStore, PackedStore, keep
from kvsieve.core.codes import CodeFormat
from kvsieve.core.selection import pack_ragged
from kvsieve.kernels.cpu import build
from kvsieve.kernels.cpu import packed as native
from kvsieve.planning.roles import Codec
from reference import reference_attention

HEADS = 2
LEVELS = (-1.7, -0.4, 0.3, 2.0)


def channel(bits: int, **other) -> CodeFormat:
    return CodeFormat(bits, "channel", **other)


def token(bits: int, group: int, **other) -> CodeFormat:
    return CodeFormat(bits, "token", group, **other)


def levels(bits: int, axis: str = "token", group: int = 16) -> CodeFormat:
    found = tuple(torch.linspace(-1, 1, 2**bits).pow(3).tolist()) if bits != 2 else LEVELS
    return CodeFormat(bits, axis, group, zero=False, levels=found)  # type: ignore[arg-type]


PAIRS = {
    "kivi-4": (channel(4), token(4, 32)),
    "kivi-2": (channel(2), token(2, 16)),
    "kivi-3": (channel(3), token(3, 16)),
    "k8v4": (token(8, 64), token(4, 64)),
    "bits-1-5": (channel(1), channel(5)),
    "bits-6-7": (token(6, 16), token(7, 16)),
    "levels-4": (levels(4), levels(4, "channel")),
    "levels-2": (levels(2, "channel"), levels(2)),
    "levels-8": (levels(8), levels(5)),
    "apart": (channel(2, apart=7), token(3, 16, apart=5)),
    "rotated": (token(4, 64, rotated=True), token(4, 64, rotated=True)),
    "centered": (channel(4, centered=True), token(4, 32, centered=True)),
    "both": (token(3, 64, rotated=True, centered=True, apart=3), token(3, 64, rotated=True, centered=True, apart=3)),
}


def packed(codec: Codec, length: int, dim: int, wide: int, dtype=torch.float32, batch: int = 1, valid=None):
    torch.manual_seed(length + dim)
    store = DenseStore()
    keys, values = torch.randn(batch, HEADS, length, dim) + 1, torch.randn(batch, HEADS, length, wide) - 0.5
    store.append(keys.to(dtype), values.to(dtype), torch.arange(length)[None], valid)
    return PackedStore.build(store, codec)


def compare(store: PackedStore, groups: int, terms: AttentionTerms | None = None, dtype=torch.float32) -> None:
    query = torch.randn(len(store.lengths), HEADS * groups, 1, store.dims[0]).to(dtype)
    wanted = reference_attention(query, store.keys, store.values, scale=0.2, valid=store.valid, terms=terms)
    close = 1e-5 if dtype == torch.float32 else 3e-2
    kernels = [False] if native.reason() else [False, True]
    for kernel in kernels:
        ours = packed_attention(query, store, scale=0.2, terms=terms, kernel=kernel)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, wanted, atol=close, rtol=close)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_format(pair):
    codec = Formats(of_keys=pair[0], of_values=pair[1])
    compare(packed(codec, 90, 64, 64), 3)


@pytest.mark.parametrize("dim, wide, groups", [(128, 128, 7), (80, 80, 1), (128, 64, 3), (32, 48, 2), (64, 64, 1)])
def test_sizes_and_numbers_of_query_heads(dim, wide, groups):
    for pair in ((channel(4), token(4, 16)), (token(3, 16, apart=4), channel(2, zero=False))):
        compare(packed(Formats(of_keys=pair[0], of_values=pair[1]), 70, dim, wide), groups)


@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "softcap"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_terms_and_padding_and_heads_of_their_own(softcap, sinks):
    terms = AttentionTerms(softcap, torch.tensor([0.5, -9, 2, 0, 9, -4]) if sinks else None)
    codec = Formats(of_keys=channel(4), of_values=token(4, 16))
    store = packed(codec, 100, 64, 64, batch=2, valid=torch.arange(100) >= torch.tensor([[70], [0]]))
    compare(store, 3, terms)
    # Blocks with room, and a KV row that has none.
    real = store.valid.expand(-1, HEADS, -1) & (torch.rand(2, HEADS, store.size) > 0.4)
    real[1, 0, :-5], real[..., -1] = False, True
    store = keep(store, pack_ragged(real))
    compare(store, 3, terms)
    # The newest token is padding in one row.
    one = torch.randn(2, 2, HEADS, 1, 64)
    store.append(*one, torch.tensor([[100]]), torch.tensor([[False], [True]]))
    compare(store, 3, terms)


def test_bfloat16_and_threads():
    store = packed(Formats(of_keys=channel(4), of_values=token(4, 32)), 100, 64, 64, torch.bfloat16)
    compare(store, 3, dtype=torch.bfloat16)
    query, before = torch.randn(1, HEADS * 3, 1, 64), torch.get_num_threads()
    wanted = reference_attention(query, store.keys, store.values, scale=0.2)
    torch.set_num_threads(2)
    try:
        ours = packed_attention(query, store, scale=0.2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(ours, wanted, atol=1e-2, rtol=0)


@pytest.mark.skipif(native.reason() is not None, reason="there is no C compiler")
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dim, wide, groups, length", [(64, 64, 7, 333), (128, 128, 3, 90), (128, 64, 5, 150)])
def test_products_in_bfloat16_round_queries_and_weights_only(pair, dim, wide, groups, length):
    store = packed(Formats(of_keys=pair[0], of_values=pair[1]), length, dim, wide, torch.bfloat16)
    query = torch.randn(1, HEADS * groups, 1, dim).bfloat16()
    # Of numbers that bfloat16 can tell, answers in float32.
    wanted = packed_attention(query.float(), store, scale=0.125, kernel=True)
    ours = packed_attention(query, store, scale=0.125, kernel=True)
    torch.testing.assert_close(ours.float(), wanted, atol=1e-2 * wanted.abs().max().item(), rtol=0)


@pytest.mark.skipif(native.reason() is not None, reason="there is no C compiler")
@pytest.mark.parametrize("lesser", ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_other_instructions_compute_the_same(tmp_path, monkeypatch, lesser):
    """As compiled for processors without the widest vectors, and without instructions for float16."""
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O0", lesser))
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))
    made = build.library.__wrapped__("packed")
    if made.reason is not None:
        pytest.skip(f"no such option: {made.reason}")
    others = build.library
    monkeypatch.setattr(build, "library", lambda name: made if name == "packed" else others(name))
    native._kernel.cache_clear()
    try:
        for of_keys, of_values in PAIRS.values():
            compare(packed(Formats(of_keys=of_keys, of_values=of_values), 45, 64, 64), 3)
        compare(
            packed(Formats(of_keys=channel(4), of_values=token(4, 16)), 45, 64, 64, torch.float16),
            3,
            dtype=torch.float16,
        )
    finally:
        native._kernel.cache_clear()


def test_large_logits_and_numbers_neither_overflow_nor_vanish():
    store = packed(Formats(of_keys=channel(8), of_values=token(8, 64)), 100, 64, 64)
    query = torch.randn(1, HEADS * 3, 1, 64) * 200
    wanted = reference_attention(query, store.keys, store.values, scale=1.0)
    for kernel in (False, native.reason() is None):
        ours = packed_attention(query, store, scale=1.0, kernel=kernel)
        torch.testing.assert_close(ours, wanted, atol=5e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_several_new_tokens_see_entries_up_to_their_own(padded, dtype):
    """In batches with padding, some of it among the new tokens, which padding alone sees."""
    batch, new, groups = 2, 5, 3
    valid = torch.arange(100) >= torch.tensor([[70], [0]]) if padded else None
    store = packed(Formats(of_keys=channel(4), of_values=token(4, 32)), 100, 64, 64, dtype, batch, valid)
    keys, values = torch.randn(2, batch, HEADS, new, 64).to(dtype)
    real = torch.tensor([[True] * new, [True, False, True, True, False]]) if padded else None
    store.append(keys, values, torch.arange(100, 100 + new)[None], real)
    query = torch.randn(batch, HEADS * groups, new, 64).to(dtype)
    terms = AttentionTerms(None, torch.tensor([0.5, -9, 2, 0, 9, -4]))
    wanted = reference_attention(query, store.keys, store.values, scale=0.2, valid=store.valid, terms=terms)
    close = 1e-5 if dtype == torch.float32 else 3e-2
    for kernel in [False] if native.reason() else [False, True]:
        ours = packed_attention(query, store, scale=0.2, terms=terms, kernel=kernel)
        torch.testing.assert_close(ours, wanted, atol=close, rtol=close)
