"""Deterministic top-k: higher first, then lower slot; ascending; filler on the left."""

from __future__ import annotations

import pytest
import torch

from kvsieve.core.selection import entries_at, select_top, top_mask


def slow(line: torch.Tensor, count: int) -> list[int]:
    order = sorted(range(len(line)), key=lambda slot: (-line[slot].item(), slot))
    return sorted(order[:count])


def test_ties_go_to_the_lower_slot():
    assert select_top(torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0]]]), (2,)).indices.tolist() == [[[1, 2]]]


@pytest.mark.parametrize("counts", [(5, 5, 5), (1, 9, 17), (17, 17, 17), (3, 1, 2)], ids=str)
def test_equals_a_stable_sort(counts):
    scores = torch.randint(0, 4, (3, 2, 17), generator=torch.Generator().manual_seed(1)).float()
    scores[1, :, 3] = float("inf")
    scores[2, :, :5] = float("-inf")
    selection = select_top(scores, counts)
    assert selection.indices.shape == (3, 2, max(counts))
    assert selection.lengths == (None if len(set(counts)) == 1 else counts)
    for row, count in enumerate(counts):
        for head in range(2):
            kept = selection.indices[row, head, max(counts) - count :].tolist()
            assert kept == slow(scores[row, head], count)


def test_real_marks_filler_on_the_left():
    selection = select_top(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), (1, 3))
    assert selection.real().tolist() == [[False, False, True], [True, True, True]]
    assert selection.indices[0, -1] == 2


def test_zero_of_a_row_keeps_nothing_there():
    assert top_mask(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), (0, 1)).tolist() == [[False, False], [False, True]]


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        select_top(torch.tensor([[1.0, float("nan")]]), (1,))


@pytest.mark.parametrize("layout", ["buffer", "turned", "expanded", "channels apart", "indices"])
def test_entries_at_slots_are_those_of_gather_however_they_lie(layout):
    part = torch.randn(2, 3, 20, 8)
    if layout == "buffer":
        part = torch.randn(2, 3, 29, 8)[:, :, 4:24]
    elif layout == "turned":
        part = torch.randn(2, 20, 3, 8).transpose(1, 2)
    elif layout == "expanded":
        part = part[:1, :1].expand(2, 3, -1, -1)
    elif layout == "channels apart":
        part = torch.randn(2, 3, 8, 20).transpose(2, 3)
    elif layout == "indices":
        part = torch.arange(120).view(2, 3, 20)
    slots = torch.stack([torch.randperm(20)[:7] for _ in range(6)]).view(2, 3, 7)
    found = entries_at(part, slots)
    assert found.shape == (2, 3, 7, *part.shape[3:])
    for row in range(2):
        for head in range(3):
            assert torch.equal(found[row, head], part[row, head][slots[row, head]])
    assert entries_at(part[:, :, :0], slots[:, :, :0]).shape == (2, 3, 0, *part.shape[3:])
