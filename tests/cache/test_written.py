"""Stores keep the keys, values and weights that a selection writes, through all that happens to entries."""

from __future__ import annotations

import pytest
import torch

from kvsieve.cache import DenseStore, LatentStore, PackedStore, RaggedStore, keep
from kvsieve.cache.parts import from_parts
from kvsieve.core.selection import pack_ragged
from kvsieve.errors import UnsupportedOptionError
from kvsieve.methods import Int8
from kvsieve.types import Selection

BATCH, HEADS, DIM, LENGTH = 2, 3, 4, 10


def filled(length=LENGTH):
    store = DenseStore()
    keys = torch.randn(BATCH, HEADS, length, DIM, dtype=torch.bfloat16)
    store.append(keys, -keys, torch.arange(length)[None], reserve=5)
    return store


def chosen(kind):
    """Return a selection of three entries, or of fewer in one head or row, with all parts."""
    stays = torch.zeros(BATCH, HEADS, LENGTH, dtype=torch.bool)
    stays[..., [1, 4, 9]] = True
    if kind == "ragged":
        stays[0, 1, 4] = False
    if kind == "rows":
        stays[1, :, 4] = False
    selection = pack_ragged(stays)
    shape = selection.indices.shape
    return Selection(
        selection.indices,
        selection.lengths,
        selection.head_lengths,
        torch.randn(*shape, DIM),
        torch.randn(*shape, DIM),
        torch.rand(shape) + 1,
    )


def check(store, selection, later=0, rows=slice(None)):
    """The kept entries are those of the selection, and later ones weigh 1."""
    real = selection.real()
    real = torch.ones_like(selection.indices, dtype=torch.bool) if real is None else real
    real = (real[:, None] if real.ndim == 2 else real).expand_as(selection.indices)[rows]
    kept = selection.indices.shape[-1]
    weights = store.log_weight
    assert weights.dtype == torch.float32 and weights.shape == store.index.shape
    assert weights.shape[-1] == kept + later and bool((weights[..., kept:] == 0).all())
    assert torch.equal(weights[..., :kept], selection.log_weight[rows].masked_fill(~real, 0))
    for name in ("keys", "values"):
        found, wanted = getattr(store, name)[:, :, :kept], getattr(selection, name)[rows].to(torch.bfloat16)
        assert torch.equal(found[real], wanted[real]) and bool(found.isfinite().all())
    assert torch.equal(store.index[..., :kept][real].long(), selection.indices[rows][real])


@pytest.fixture(params=["dense", "rows", "ragged"])
def both(request):
    torch.manual_seed(0)
    selection = chosen(request.param)
    store = keep(filled(), selection, 4)
    assert type(store) is (RaggedStore if request.param == "ragged" else DenseStore)
    return store, selection


def appended(store, count, start=LENGTH):
    keys = torch.randn(BATCH, HEADS, count, DIM, dtype=torch.bfloat16)
    store.append(keys, keys, torch.arange(start, start + count)[None])


def test_written_entries_and_later_ones(both):
    store, selection = both
    check(store, selection)
    appended(store, 2)
    check(store, selection, 2)
    appended(store, 90)
    check(store, selection, 92)
    store.drop_last([91] * BATCH)
    appended(store, 1)
    check(store, selection, 2)


def test_copies_rows_and_files(both):
    store, selection = both
    appended(store, 1)
    check(store.clone(), selection, 1)
    shared = store.share()
    appended(shared, 2)
    check(shared, selection, 3)
    check(store, selection, 1)
    parts = store.parts()
    check(from_parts(parts), selection, 1)
    check(store.padded(), selection, 1)
    rows = torch.tensor([1, 0])
    store.reorder(rows)
    check(store, selection, 1, rows)


def test_weights_stay_through_another_selection_or_are_replaced(both):
    store, selection = both
    before = store.log_weight.clone()
    last = torch.tensor([[1, 2]] * HEADS).expand(BATCH, -1, -1)
    again = keep(store.clone(), Selection(last))
    assert torch.equal(again.log_weight, before[..., 1:]) or store.is_ragged
    weights = torch.full(last.shape, 0.5)
    assert torch.equal(keep(store, Selection(last, log_weight=weights)).log_weight, weights)


def test_buffers_that_are_kept_are_written_too():
    store = filled(12)
    slots = torch.arange(1, 12).expand(BATCH, HEADS, -1)
    weights = torch.rand(slots.shape)
    values = torch.randn(*slots.shape, DIM)
    address = store.buffers()[0].data_ptr()
    before = store.keys[:, :, 1:].clone()
    store.keep(Selection(slots, values=values, log_weight=weights), 5, reuse=True)
    assert store.buffers()[0].data_ptr() == address and torch.equal(store.keys, before)
    assert torch.equal(store.values, values.bfloat16()) and torch.equal(store.log_weight, weights)


def test_rows_without_weights_beside_rows_with():
    torch.manual_seed(0)
    selection = chosen("dense")
    plain, weighted = filled(7), keep(filled(), selection)
    both = DenseStore.stack([plain, weighted], 2)
    assert bool((both.log_weight[:BATCH] == 0).all())
    assert torch.equal(both.log_weight[BATCH:, :, -3:], selection.log_weight)
    assert bool((both.log_weight[BATCH:, :, :-3] == 0).all())
    appended_keys = torch.zeros(2 * BATCH, HEADS, 1, DIM, dtype=torch.bfloat16)
    both.append(appended_keys, appended_keys, torch.tensor([[LENGTH]]))
    assert bool((both.log_weight[..., -1] == 0).all())


def test_bytes_have_the_weights():
    plain, weighted = keep(filled(), Selection(chosen("dense").indices)), keep(filled(), chosen("dense"))
    assert weighted.entry_size() == plain.entry_size() + 4
    slots = BATCH * HEADS * weighted.capacity
    assert weighted.nbytes() - plain.nbytes() == weighted.entry_bytes() - plain.entry_bytes() == 4 * slots


def test_other_forms_refuse():
    with pytest.raises(UnsupportedOptionError, match="entries are encoded"):
        keep(PackedStore.build(filled(), Int8(block=8, tail=1)), chosen("dense"))
    with pytest.raises(UnsupportedOptionError, match="entries have weights, which codecs do not keep"):
        PackedStore.build(keep(filled(), chosen("dense")), Int8(block=8, tail=1))
    latent = LatentStore()
    keys = torch.randn(BATCH, 1, LENGTH, 6)
    latent.append(keys, keys[..., :4], torch.arange(LENGTH)[None])
    slots = torch.tensor([[[1, 4]]] * BATCH)
    with pytest.raises(UnsupportedOptionError, match="stores latents"):
        keep(latent, Selection(slots, log_weight=torch.zeros(slots.shape)))
