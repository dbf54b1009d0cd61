"""The store keeps the right entries, frees the others and never reads beyond what it holds."""

from __future__ import annotations

import pytest
import torch

from kvsieve.cache import DenseStore
from kvsieve.types import Selection


def coded(columns: list[int], batch: int = 2, heads: int = 3, dim: int = 2) -> torch.Tensor:
    """Entries whose value tells row, head and column."""
    row, head, column = torch.meshgrid(torch.arange(batch), torch.arange(heads), torch.tensor(columns), indexing="ij")
    return (10000.0 * row + 1000 * head + column)[..., None].expand(-1, -1, -1, dim).clone()


def filled(length: int, reserve: int = 0, **options) -> DenseStore:
    store = DenseStore()
    columns = list(range(length))
    keys = coded(columns, **options)
    store.append(keys, -keys, torch.arange(length)[None], reserve=reserve)
    for buffer in store.buffers()[:2]:
        buffer[:, :, length:] = float("nan")
    return store


def test_appending_grows_and_keeps_content():
    store = filled(5)
    for column in range(5, 90):
        keys = coded([column])
        store.append(keys, -keys, torch.tensor([[column]]))
    assert torch.equal(store.keys, coded(list(range(90)))) and torch.equal(store.values, -store.keys)
    assert store.index[1, 2].tolist() == list(range(90)) and store.lengths == (90, 90) and store.valid is None


def test_room_is_used_in_place():
    store = filled(5, reserve=3)
    address = store.keys.data_ptr()
    store.append(coded([5, 6, 7]), coded([5, 6, 7]), torch.tensor([[5, 6, 7]]))
    assert store.keys.data_ptr() == address and store.keys.isfinite().all()


def test_keeping_gathers_per_head_and_frees_the_rest():
    store = filled(400, reserve=50)
    before = store.nbytes()
    slots = torch.tensor([[0, 7, 399], [1, 2, 3], [5, 10, 20]]).expand(2, -1, -1)
    store.keep(Selection(slots), reserve=4)
    assert store.keys[1, :, :, 0].tolist() == [[10000, 10007, 10399], [11001, 11002, 11003], [12005, 12010, 12020]]
    assert torch.equal(store.index.long(), slots)
    assert store.nbytes() == 2 * 3 * 7 * (2 * 2 * 4 + 4) < before / 50


def test_rows_of_unequal_length_carry_filler():
    store = filled(6)
    slots = torch.tensor([[[4, 2, 5]] * 3, [[0, 1, 5]] * 3])
    store.keep(Selection(slots, lengths=(2, 3)))
    assert store.valid[:, 0].tolist() == [[False, True, True], [True, True, True]]
    assert store.index[0, 0].tolist() == [-1, 2, 5] and store.lengths == (2, 3)
    store.append(coded([6]), coded([6]), torch.tensor([[6]]))
    assert store.valid[0, 0].tolist() == [False, True, True, True] and store.lengths == (3, 4)


def test_a_set_per_query_head_stores_copies():
    store = filled(4)
    store.keep(Selection(torch.tensor([[0], [3], [1], [1], [2], [0]]).expand(2, -1, -1)))
    assert store.heads == 6 and store.keys[0, :, 0, 0].tolist() == [0, 3, 1001, 1001, 2002, 2000]
    store.append(coded([4]), coded([4]), torch.tensor([[4]]))
    assert store.keys[0, :, 1, 0].tolist() == [4, 4, 1004, 1004, 2004, 2004]


def test_reordering_rows():
    store = filled(3)
    store.keep(Selection(torch.tensor([[[0, 1]] * 3, [[1, 2]] * 3]), lengths=(1, 2)))
    store.reorder(torch.tensor([1, 1, 0]))
    assert store.lengths == (2, 2, 1) and store.keys[:, 0, -1, 0].tolist() == [10002, 10002, 1]


def test_a_changed_mask_reaches_what_is_stored():
    store = filled(5)
    store.keep(Selection(torch.tensor([[0, 2], [1, 2], [3, 4]]).expand(2, -1, -1)))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2] = False
    store.remask(mask)
    assert store.valid[0].tolist() == [[True, False], [True, False], [True, True]] and store.valid[1].all()
    assert store.lengths == (2, 2)


def test_an_empty_store_says_so():
    with pytest.raises(RuntimeError, match="stores nothing"):
        _ = DenseStore().keys
