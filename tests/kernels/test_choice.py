"""The kernels of a token's choice give what torch's operations do."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvsieve import kernels
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.page_weights import entries_of_pages, largest_channels


def in_torch():
    return mock.patch.object(kernels, "usable", lambda *tensors: False)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("groups, dim", [(1, 16), (3, 40), (4, 128)])
@pytest.mark.parametrize("halves", [1, 2])
def test_largest_channels(dtype, groups, dim, halves):
    torch.manual_seed(groups)
    query = torch.randn(2, groups, dim).to(dtype)
    # Equals come in order, and one query head may have nothing in any chosen channel.
    query[0, :, 5] = query[0, :, 9] = 4
    query[1, -1] = 0
    for count in (1, 2, 7, dim):
        ours, rows = largest_channels(query, count, 0.3, halves)
        with in_torch():
            theirs, wanted = largest_channels(query, count, 0.3, halves)
        assert ours.dtype == torch.float32 and torch.equal(rows, wanted)
        torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-5)


def rows_of(size, length):
    buffer = torch.zeros(1, 4)
    known = None if length is None else DeviceLength(torch.tensor(length))
    return KVRows(buffer, buffer, None, torch.zeros(2, dtype=torch.int64), 1, size, known)


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("on_device", [False, True], ids=["int", "device"])
@pytest.mark.parametrize("size, page, count", [
    (41, 3, 9), (41, 3, 10), (42, 3, 14), (41, 1, 7), (300, 7, 64), (300, 100, 64), (300, 7, 300), (9, 16, 4),
    (9, 16, 9), (5, 2, 1),
])  # fmt: skip
def test_entries_of_the_best_pages(size, page, count, on_device, newest):
    torch.manual_seed(size + count)
    room = size + 23 if on_device else size
    scores = 3 * torch.randn(2, 3, -(-room // page))
    known = rows_of(room, size if on_device else None)
    ours = entries_of_pages(scores.clone(), known, page, count, newest)
    with in_torch():
        theirs = entries_of_pages(scores.clone(), known, page, count, newest)
    assert ours.shape == (2, count)
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
    assert len(set(ours[0].tolist())) == count and ours.max() < size


def test_of_pages_of_equal_weight_just_enough_entries_are_taken():
    known = rows_of(60, None)
    for newest in (False, True):
        found = entries_of_pages(torch.zeros(2, 1, 20), known, 3, 17, newest)
        assert [len(set(row.tolist())) for row in found] == [17, 17] and found.max() < 60
