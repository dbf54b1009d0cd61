"""Decoding kernels equal the slow definition, whatever the entries lie in and however they are split.

Capped logits, sinks and blends are drawn in test_table.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attend import AttentionTerms, asking, dense_attention, ragged_attention, sparse_attention
from kvsieve import kernels
from kvsieve.attention import AttentionRequest, DenseEntries, FlatEntries, attend, executors
from kvsieve.cache import DenseStore, keep
from kvsieve.core.kv_rows import Choice, DeviceLength, KVRows
from kvsieve.core.selection import pack_ragged
from kvsieve.kernels import decode, launch
from reference import reference_attention

# Types with numbers of query heads per KV row.
MIXES = {
    "fp32-G3": (torch.float32, 3),
    "bf16-G1": (torch.bfloat16, 1),
    "bf16-G17": (torch.bfloat16, 17),
    "fp16-G4": (torch.float16, 4),
}
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=[1, 50], ids=["one-part", "parts"], autouse=True)
def parts(request, monkeypatch):
    """How far KV rows are split; tiles are small, so that there are several of them."""
    monkeypatch.setattr(decode, "multiprocessors", lambda device: request.param)
    monkeypatch.setattr(decode, "_BYTES", 2048)
    if request.param == 1:
        monkeypatch.setattr(decode, "PER_SM", 1)


def close(ours, theirs):
    assert ours.isfinite().all()
    torch.testing.assert_close(ours.float(), theirs.float(), atol=CLOSE[ours.dtype], rtol=CLOSE[ours.dtype])


def tensors(dtype, groups, heads=2, size=77, dim=20, value_dim=12, batch=2):
    torch.manual_seed(size + groups)
    shapes = (batch, heads * groups, 1, dim), (batch, heads, size, dim), (batch, heads, size, value_dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype, groups", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("padding", [None, "heads"])
def test_dense_views_of_larger_buffers(dtype, groups, padding):
    query, keys, values = tensors(dtype, groups)
    keys, values = keys[:, :, 3:66], values.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :63]
    valid = None
    if padding is not None:
        valid = torch.rand(2, 2, 63) > 0.4
        valid[1, :, :40], valid[0, :, -1] = False, False
    ours = dense_attention(query, keys, values, scale=0.3, valid=valid)
    close(ours, reference_attention(query, keys, values, scale=0.3, valid=valid))


@pytest.mark.parametrize("dtype, groups, new", [(torch.float32, 3, 1), (torch.bfloat16, 7, 17), (torch.float16, 17, 4)])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_an_entry_counts_as_its_copies(dtype, groups, new, padded):
    _, keys, values = tensors(dtype, groups)
    query = torch.randn(2, 2 * groups, new, 20).to(dtype)
    copies = torch.tensor([3, 1, 2] * 20 + [1] * 17)
    valid = None
    if padded:
        valid = torch.ones(2, 1, 77, dtype=torch.bool)
        valid[0, :, :9] = valid[1, :, -new:] = False
    stored = DenseEntries(keys, values, valid, log_weight=copies.float().log().expand(2, 2, -1))
    request = AttentionRequest(asking(query, 0.3), stored)
    ours = next(row for row in executors(request) if row.name.startswith("Triton")).run(request)
    whole = (part.repeat_interleave(copies, 2) for part in (keys, values))
    shown = None if valid is None else valid.repeat_interleave(copies, 2)
    close(ours, reference_attention(query, *whole, scale=0.3, valid=shown))


@pytest.mark.parametrize("dtype, groups, new", [(torch.float32, 3, 5), (torch.bfloat16, 7, 17), (torch.float16, 17, 4)])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("length", [None, 60], ids=["", "on-the-device"])
def test_several_tokens_see_the_entries_up_to_their_own(dtype, groups, new, padded, length):
    """Capped, and beside sinks; the queries of many tokens are shared among programs."""
    query, keys, values = tensors(dtype, groups)
    query = query.repeat(1, 1, new, 1) * torch.linspace(0.5, 1.5, new)[:, None].to(dtype)
    seen = 77 if length is None else length
    keys[:, :, seen:] = values[:, :, seen:] = float("nan")
    valid = torch.rand(2, 2, 77) > 0.4 if padded else None
    count = None if length is None else torch.tensor(length)
    terms = AttentionTerms(2.0, torch.linspace(-3, 3, 2 * groups).to(dtype))
    ours = kernels.decode_attention(asking(query, 0.3, terms), keys, values, length=count, valid=valid)
    shown = None if valid is None else valid[..., :seen]
    wanted = reference_attention(query, keys[:, :, :seen], values[:, :, :seen], scale=0.3, valid=shown, terms=terms)
    close(ours, wanted)


@pytest.mark.parametrize(("length", "kind"), [(1, torch.int32), (33, torch.int32), (77, torch.int64)], ids=str)
def test_a_length_on_the_device(length, kind):
    query, keys, values = tensors(torch.float32, 2)
    keys[:, :, length:] = values[:, :, length:] = float("nan")
    valid = torch.rand(2, 1, 77) > 0.5
    for count in (torch.tensor(length, dtype=kind), torch.tensor([length], dtype=kind), length):
        ours = kernels.decode_attention(asking(query, 0.3), keys, values, length=count, valid=valid)
        seen = (part[:, :, :length] for part in (keys, values))
        close(ours, reference_attention(query, *seen, scale=0.3, valid=valid[..., :length]))


@pytest.mark.parametrize("dtype, groups", MIXES.values(), ids=MIXES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_heads_of_different_numbers_of_entries(dtype, groups):
    query, keys, values = tensors(dtype, groups, heads=3)
    kept = torch.rand(2, 3, 77) > torch.tensor([0.1, 0.9, 0.97])[:, None]
    kept[..., 70:] = True
    full = DenseStore()
    full.append(keys, values, torch.arange(77)[None])
    store = keep(full.clone(), pack_ragged(kept))
    ours = ragged_attention(query, *store.flat, scale=0.3)
    close(ours, reference_attention(query, keys, values, scale=0.3, valid=kept))


@pytest.mark.parametrize("dtype, groups", [(torch.float32, 3), (torch.bfloat16, 17)], ids=str)
@pytest.mark.filterwarnings("ignore:overflow")
def test_several_tokens_over_heads_of_different_numbers_of_entries(dtype, groups):
    """Each sees the entries up to its own."""
    query, keys, values = tensors(dtype, groups, heads=3)
    kept = torch.rand(2, 3, 70) > torch.tensor([0.1, 0.9, 0.97])[:, None]
    full = DenseStore()
    full.append(keys[:, :, :70], values[:, :, :70], torch.arange(70)[None])
    store = keep(full, pack_ragged(kept))
    store.append(keys[:, :, 70:], values[:, :, 70:], torch.arange(70, 77)[None])
    query = query.repeat(1, 1, 7, 1) * torch.linspace(0.5, 1.5, 7)[:, None].to(dtype)
    ours = attend(AttentionRequest(asking(query, 0.3), FlatEntries(*store.flat, used=store.size)))
    valid = torch.cat([kept, torch.ones(2, 3, 7, dtype=torch.bool)], -1)
    close(ours, reference_attention(query, keys, values, scale=0.3, valid=valid))


def kv_rows_in(keys, values, body, stride):
    """KV rows over the slots of flat buffers; `size` entries each, of which `body` are listed."""
    kv_rows, size = 4, 50
    slots = torch.randperm(len(keys))
    tail = 2 + torch.arange(kv_rows)
    listed = slots[: kv_rows * body].view(kv_rows, body) if body else None
    return KVRows(keys, values, listed, tail, stride, size)


@pytest.mark.parametrize("body", [0, 1, 21], ids=lambda n: f"{n}-listed")
@pytest.mark.parametrize("chosen", [None, "all", 7, 49, "per-query-head", "one-for-all"])
def test_entries_of_kv_rows(body, chosen):
    query, keys, values = tensors(torch.bfloat16 if body else torch.float32, 1, heads=12, size=250, batch=1)
    query, keys, values = query.view(4, 3, 20), keys[0, 0], values[0, 0]
    kv_rows = kv_rows_in(keys, values, body, stride=4)
    everything = kv_rows.span(0, kv_rows.size)
    entries = everything
    if isinstance(chosen, int):
        entries = torch.rand(4, kv_rows.size).argsort(-1)[:, :chosen]
    elif chosen == "per-query-head":
        entries = torch.rand(4, 3, kv_rows.size).argsort(-1)[..., :9]
    elif chosen is None:
        entries = None
    if entries is None:
        on_device = dataclasses.replace(kv_rows, length=DeviceLength(torch.tensor(kv_rows.size - 5)))
        ours = kernels.kv_row_attention(asking(query, 0.3), on_device)
        entries = everything[:, :-5]
    elif chosen == "all":
        ours = kernels.kv_row_attention(asking(query, 0.3), kv_rows)
    else:
        ours = sparse_attention(query, kv_rows, Choice(entries), scale=0.3)
    per_head = entries if entries.ndim == 3 else entries[:, None].expand(-1, 3, -1)
    found = [
        reference_attention(
            query[None, :, one, None], *(part[None] for part in kv_rows.read(per_head[:, one])), scale=0.3
        )
        for one in range(3)
    ]
    close(ours, torch.cat([each[0] for each in found], 1))


@pytest.fixture(params=["softcap", "sinks", "both"])
def terms(request):
    """Terms for 6 query heads; of the sinks some take nearly all."""
    softcap = None if request.param == "sinks" else 0.7
    return AttentionTerms(softcap, None if request.param == "softcap" else torch.tensor([0.5, -9, 2, 0, 9, -4]))


def test_sinks_are_not_in_the_norm_and_take_all_where_nothing_is_seen(terms):
    query, keys, values = tensors(torch.float32, 3)
    plain = AttentionTerms(terms.softcap)
    for entries in (decode.Entries(70, 77), decode.Entries(torch.tensor(0), 77)):
        _, norm = decode.attend(asking(query, 0.3, plain), query.view(4, 3, 20), keys, values, entries)
        out, same = decode.attend(asking(query, 0.3, terms), query.view(4, 3, 20), keys, values, entries)
        assert torch.equal(norm, same)
    assert out.eq(0).all()


def test_the_norm_is_the_log_sum_exp_and_nothing_seen_gives_nothing():
    query, keys, values = tensors(torch.float32, 2)
    out, norm = decode.attend(asking(query, 0.3), query.view(4, 2, 20), keys, values, decode.Entries(70, 77))
    logits = query.view(2, 2, 2, 20) @ keys[:, :, :70].transpose(-1, -2) * 0.3
    close(norm, logits.logsumexp(-1).view(4, 2))
    nothing = decode.Entries(torch.tensor(0), 77)
    out, norm = decode.attend(asking(query, 0.3), query.view(4, 2, 20), keys, values, nothing)
    assert out.eq(0).all() and norm.eq(float("-inf")).all()


def test_what_is_split_fills_the_gpu(monkeypatch):
    """Programs are no more than run at a time; a length's growth changes no compiled kernel."""
    launched = []

    class Spy:
        def __getitem__(self, grid):
            return lambda *args, **sizes: launched.append((grid, sizes))

    monkeypatch.setattr(decode, "split_kernel", Spy())
    monkeypatch.setattr(decode, "merge_kernel", Spy())
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode, "PER_SM", launch.PER_SM)
    monkeypatch.setattr(decode, "_BYTES", 32 << 10)
    for size in (131072, 131073):
        query, keys = (torch.empty(1, heads, 1, 128, dtype=torch.bfloat16) for heads in (32, 8))
        keys = keys.expand(-1, -1, size, -1)
        kernels.decode_attention(asking(query, 1.0), keys, keys)
    (first, sizes), _, (second, same), _ = launched
    assert first == second and sizes == same
    assert 200 <= first[0] * first[1] <= 132 * launch.PER_SM
