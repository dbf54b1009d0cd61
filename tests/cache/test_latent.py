"""A store of latents: values are a part of the keys, and take no memory of their own."""

from __future__ import annotations

import pytest
import torch

from kvsieve.cache import LatentStore, View, group_rows, keep
from kvsieve.cache.parts import from_parts
from kvsieve.errors import UnsupportedModelError
from kvsieve.types import Selection

RANK, WIDTH = 6, 8


def filled(tokens=10, reserve=0):
    torch.manual_seed(0)
    entries = torch.randn(2, 1, tokens, WIDTH)
    store = LatentStore()
    store.append(entries, entries[..., :RANK], torch.arange(tokens)[None], reserve=reserve)
    return store, entries


def test_values_are_the_first_channels_of_keys_and_cost_nothing():
    store, entries = filled()
    assert torch.equal(store.keys, entries) and torch.equal(store.values, entries[..., :RANK])
    assert store.values.untyped_storage().data_ptr() == store.keys.untyped_storage().data_ptr()
    assert store.entry_bytes() == entries.nbytes
    more = torch.randn(2, 1, 3, WIDTH)
    store.append(more, more[..., :RANK], torch.arange(10, 13)[None])
    assert torch.equal(store.values, torch.cat([entries, more], 2)[..., :RANK])


@pytest.mark.parametrize("how", ["clone", "share", "saved"])
def test_copies_and_rows_stay_latents(how):
    store, entries = filled()
    other = from_parts(store.parts()) if how == "saved" else getattr(store, how)()
    assert isinstance(other, LatentStore) and torch.equal(other.values, entries[..., :RANK])
    other.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(other.values, entries[[1, 1, 0], ..., :RANK]) and torch.equal(store.keys, entries)
    assert isinstance(from_parts(LatentStore().parts()), LatentStore)


def test_one_head_never_becomes_ragged():
    store, entries = filled()
    slots = torch.tensor([[[0, 1, 4, 9]], [[2, 3, 5, 7]]])
    kept = keep(store, Selection(slots, head_lengths=((4,), (2,))))
    assert kept is store and store.lengths == (4, 2)
    assert torch.equal(store.values[0, 0], entries[0, 0, [0, 1, 4, 9], :RANK])
    assert store.valid.tolist() == [[[True] * 4], [[False, False, True, True]]]
    keep(store, Selection(torch.tensor([[[1, 3]], [[2, 3]]]), head_lengths=((2,), (2,))))
    assert store.valid is None and store.entry_bytes() == 2 * 2 * WIDTH * 4


def test_a_set_per_query_head_is_refused():
    store, _ = filled()
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        store.keep(Selection(torch.zeros(2, 3, 4, dtype=torch.int64)))


def test_a_view_reads_latents():
    store, entries = filled()
    view = View(torch.tensor([[[1, 4]], [[0, 2]]]), None, store.size)
    grouped = group_rows(store, view, [None, None])
    keys, values = grouped.kv_rows(store, grouped.groups[0]).read(torch.tensor([[0, 1], [0, 1]]))
    assert torch.equal(keys[1], entries[1, 0, [0, 2]]) and torch.equal(values[0], entries[0, 0, [1, 4], :RANK])
