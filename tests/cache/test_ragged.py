"""A ragged store holds what each head kept and nothing else, and reads like a masked dense one."""

from __future__ import annotations

import pytest
import torch

from attend import dense_attention, ragged_attention
from kvsieve.cache import DenseStore, RaggedStore, keep
from kvsieve.core.selection import pack_ragged
from kvsieve.types import Selection
from reference import reference_attention

LENGTH, HEADS, DIM = 37, 3, 8


def stores(groups=1, padded=False, new=0, dtype=torch.float64):
    """The same ragged selection as a RaggedStore and as a full DenseStore and a mask; `new` tokens appended."""
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2, HEADS, LENGTH + new, DIM, dtype=dtype)
    kept = torch.rand(2, HEADS, LENGTH) > torch.tensor([0.2, 0.6, 0.9])[:, None]
    if padded:
        kept[1, :, :20] = False
    columns = torch.arange(LENGTH + new)[None]
    full = DenseStore()
    full.append(keys[:, :, :LENGTH], values[:, :, :LENGTH], columns[:, :LENGTH])
    ragged = keep(full.clone(), pack_ragged(kept))
    assert isinstance(ragged, RaggedStore)
    for column in range(LENGTH, LENGTH + new):
        one = slice(column, column + 1)
        ragged.append(keys[:, :, one], values[:, :, one], columns[:, one])
    full.append(keys[:, :, LENGTH:], values[:, :, LENGTH:], columns[:, LENGTH:])
    visible = torch.cat([kept, torch.ones(2, HEADS, new, dtype=torch.bool)], -1)
    return ragged, full, visible


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_decoding_equals_masked_dense_attention(groups, padded):
    ragged, full, visible = stores(groups, padded, new=5)
    query = torch.randn(2, HEADS * groups, 1, DIM, dtype=torch.float64)
    ours = ragged_attention(query, *ragged.flat, scale=0.3)
    theirs = reference_attention(query, full.keys, full.values, scale=0.3, valid=visible)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_buffer_cut_into_parts_gives_the_same(monkeypatch, threads, dtype):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(2)
    keys, values = torch.randn(2, 1, 2, 1500, DIM, dtype=dtype)
    kept = torch.zeros(1, 2, 1500, dtype=torch.bool)
    kept[0, 0, 3:1400], kept[0, 1, 700:990], kept[..., -1] = True, True, True
    full = DenseStore()
    full.append(keys, values, torch.arange(1500)[None])
    query = torch.randn(1, 6, 1, DIM, dtype=dtype)
    ours = ragged_attention(query, *keep(full, pack_ragged(kept)).flat, scale=0.3)
    theirs = reference_attention(query.float(), full.keys.float(), full.values.float(), scale=0.3, valid=kept)
    torch.testing.assert_close(ours.float(), theirs, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0)


def test_slots_behind_the_end_are_nobodys_whoever_used_them_before():
    ragged, full, visible = stores()
    before, other = ragged.share(), ragged.share()
    for _ in range(3):
        other.append(*torch.full((2, 2, HEADS, 1, DIM), 50.0, dtype=torch.float64), torch.tensor([[LENGTH]]))
    one = torch.randn(2, HEADS, 1, DIM, dtype=torch.float64)
    before.append(one, one, torch.tensor([[LENGTH]]))
    full.append(one, one, torch.tensor([[LENGTH]]))
    visible = torch.cat([visible, torch.ones(2, HEADS, 1, dtype=torch.bool)], -1)
    query = torch.randn(2, HEADS, 1, DIM, dtype=torch.float64)
    ours = ragged_attention(query, *before.flat, scale=1.0)
    torch.testing.assert_close(ours, reference_attention(query, full.keys, full.values, scale=1.0, valid=visible))


def test_several_new_tokens_read_the_padded_view():
    ragged, full, visible = stores(2, padded=True, new=7)
    query = torch.randn(2, HEADS * 2, 7, DIM, dtype=torch.float64)
    ours = dense_attention(query, ragged.keys, ragged.values, scale=0.3, valid=ragged.valid)
    theirs = reference_attention(query, full.keys, full.values, scale=0.3, valid=visible)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_the_padded_view_shows_each_heads_entries_in_order():
    ragged, _, visible = stores(padded=True, new=3)
    for row in range(2):
        for head in range(HEADS):
            real = ragged.valid[row, head]
            assert ragged.index[row, head][real].tolist() == visible[row, head].nonzero()[:, 0].tolist()
            assert bool(real[-3:].all()) and (ragged.index[row, head][~real] == -1).all()
    assert ragged.lengths == tuple(visible.sum(-1).amax(-1).tolist())
    assert ragged.entries == -(-int(visible.sum((1, 2)).max()) // HEADS)


def test_memory_is_that_of_the_entries_kept():
    full = DenseStore()
    keys = torch.randn(1, 2, 1000, 64)
    full.append(keys, keys.clone(), torch.arange(1000)[None])
    mask = torch.zeros(1, 2, 1000, dtype=torch.bool)
    mask[0, 0, :190], mask[0, 1, :10] = True, True
    # Per entry: keys, values, index, and what attention adds for each head. 200 entries, room for 4 tokens of 2 heads;
    # and how many each head keeps.
    assert keep(full, pack_ragged(mask), reserve=4).nbytes() == (200 + 4 * 2) * (2 * 64 * 4 + 4 + 2 * 4) + 2 * 8


def test_heads_that_keep_as_many_stay_dense():
    full = DenseStore()
    full.append(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), torch.arange(9)[None])
    mask = torch.zeros(1, 2, 9, dtype=torch.bool)
    mask[0, 0, :3], mask[0, 1, 4:7] = True, True
    store = keep(full, pack_ragged(mask))
    assert store is full and store.index.tolist() == [[[0, 1, 2], [4, 5, 6]]]


def test_a_ragged_store_is_reduced_again_and_grows():
    ragged, _, visible = stores(new=4)
    again = keep(ragged, pack_ragged(ragged.valid & (ragged.index % 2 == 0)))
    for row in range(2):
        for head in range(HEADS):
            wanted = [column for column in visible[row, head].nonzero()[:, 0].tolist() if column % 2 == 0]
            assert again.index[row, head][again.valid[row, head]].tolist() == wanted
    for column in range(200):
        one = torch.full((2, HEADS, 1, DIM), float(column), dtype=torch.float64)
        again.append(one, -one, torch.tensor([[column]]))
    assert torch.equal(again.keys[:, :, -200:, 0], torch.arange(200.0).double().expand(2, HEADS, -1))
    assert torch.equal(again.values[:, :, -200:], -again.keys[:, :, -200:])


def test_a_set_per_query_head_may_be_ragged():
    full = DenseStore()
    keys = torch.arange(5.0).expand(1, 2, 5)[..., None] + torch.tensor([0.0, 100.0])[None, :, None, None]
    full.append(keys, keys, torch.arange(5)[None])
    slots = torch.tensor([[[0, 4], [3, 4], [1, 2], [0, 3]]])
    store = keep(full, Selection(slots, (2,), ((1, 2, 2, 1),)))
    shown = [store.keys[0, head, :, 0][store.valid[0, head]].tolist() for head in range(4)]
    assert shown == [[4], [3, 4], [101, 102], [103]]


def test_rows_are_reordered_and_copies_are_independent():
    ragged, _, _ = stores(padded=True)
    shared, cloned = ragged.share(), ragged.clone()
    before = ragged.index.clone()
    shared.reorder(torch.tensor([1, 1, 0]))
    assert shared.lengths == tuple(ragged.lengths[row] for row in (1, 1, 0))
    assert torch.equal(shared.keys, ragged.keys[[1, 1, 0]]) and torch.equal(shared.valid, ragged.valid[[1, 1, 0]])
    cloned.buffers()[2].fill_(7)
    assert torch.equal(ragged.index, before)


def test_a_changed_mask_reaches_what_is_stored():
    ragged, _, visible = stores(new=2)
    mask = torch.ones(2, LENGTH + 2, dtype=torch.bool)
    mask[0, :10] = False
    ragged.remask(mask)
    for head in range(HEADS):
        wanted = [column for column in visible[0, head].nonzero()[:, 0].tolist() if column >= 10]
        assert ragged.index[0, head][ragged.valid[0, head]].tolist() == wanted
    ragged.remask(torch.ones_like(mask))
    assert int(ragged.valid.sum()) == int(visible.sum())


def test_new_padding_is_stored_unseen_but_sees_itself():
    ragged, full, visible = stores()
    one = torch.randn(2, HEADS, 1, DIM, dtype=torch.float64)
    ragged.append(one, one, torch.tensor([[LENGTH]]), torch.tensor([[True], [False]]))
    full.append(one, one, torch.tensor([[LENGTH]]))
    visible = torch.cat([visible, torch.tensor([True, False])[:, None, None].expand(2, HEADS, 1)], -1)
    query = torch.randn(2, HEADS, 1, DIM, dtype=torch.float64)
    ours = ragged_attention(query, *ragged.flat, scale=1.0)
    torch.testing.assert_close(ours, reference_attention(query, full.keys, full.values, scale=1.0, valid=visible))
    assert ragged.valid[:, :, -1].tolist() == [[True] * HEADS, [False] * HEADS]
