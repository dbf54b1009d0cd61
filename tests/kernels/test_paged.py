"""The kernels choose the pages of a paged cache that plain torch chooses."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvsieve import kernels
from kvsieve.methods import Quest
from kvsieve_vllm import pages
from kvsieve_vllm.pages import PageBounds, choose_pages

HEADS, GROUPS, DIM, FREE = 2, 3, 16, 150


@pytest.fixture(autouse=True)
def no_c(monkeypatch):
    monkeypatch.setattr(pages, "usable", lambda bounds: False)


def known(sizes: list[int], page: int, parts: int, means: bool, dtype: torch.dtype):
    """What is known of pages that lie anywhere, and their table, wider than any request needs."""
    torch.manual_seed(len(sizes) + page)
    bounds = PageBounds(FREE, HEADS, DIM, page, torch.zeros(1, dtype=dtype), parts=parts, means=means)
    width = max(-(-max(sizes) // page), 1) + 2
    table = (torch.randperm(FREE - 1)[: len(sizes) * width] + 1).view(len(sizes), width)
    for size, own in zip(sizes, table, strict=True):
        slots = (own[:, None] * page + torch.arange(page)).flatten()[:size]
        bounds.update(torch.randn(size, HEADS, DIM).to(dtype), slots)
    return bounds, table.to(torch.int32)


# Weights of a row without entries are not numbers, and nobody asks for them.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("means", [False, True], ids=["bounds", "means"])
@pytest.mark.parametrize("page, parts", [(8, 1), (8, 4), (12, 3)])
def test_pages_are_those_of_plain_torch(page, parts, means, dtype):
    # A padded row, short ones, one that ends with a page, and long ones.
    sizes, counts = [0, 1, 2 * page, 9 * page + 1, 13 * page, 14 * page - 1], [3, 4, 2, 4, 5, 2]
    bounds, table = known(sizes, page, parts, means, dtype)
    query = torch.randn(len(sizes), HEADS, GROUPS, DIM).to(dtype)
    question = Quest(budget=64, means=means).question(query, 0.4, bounds.page, None)
    given = (
        *(bounds.table, question, table, torch.tensor(sizes, dtype=torch.int32)),
        *(torch.tensor(counts, dtype=torch.int32), max(counts), page, parts),
    )
    with mock.patch.object(kernels, "paged_choice", wraps=kernels.paged_choice) as asked:
        ours = choose_pages(*given)
    assert asked.call_count == 1
    with mock.patch.object(kernels, "usable", lambda *tensors: False):
        theirs = choose_pages(*given)
    assert ours.dtype == torch.int32 and ours.shape == (len(sizes), HEADS, max(counts))
    for request, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        held = min(count, -(-size // page))
        assert torch.equal(ours[request, :, :held], theirs[request, :, :held])
        # The others name a page that is there.
        assert ours[request].min() >= 0 and ours[request].max() < FREE * HEADS


def test_equal_pages_are_taken_in_order():
    scores = torch.zeros(1, HEADS, GROUPS, 40)
    table = torch.arange(40, dtype=torch.int32)[None] + 7
    sizes, counts = (torch.tensor([each], dtype=torch.int32) for each in (39 * 8 + 3, 4))
    found = kernels.paged_choice(scores, table, sizes, counts, 6, 8, 1, False)
    for head in range(HEADS):
        assert found[0, head].tolist() == [(page + 7) * HEADS + head for page in (0, 1, 2, 39)] + [head, head]


def test_more_pages_than_a_program_holds_are_chosen_in_torch():
    assert kernels.choice_fits(kernels.MOST_PAGES, 1) and not kernels.choice_fits(kernels.MOST_PAGES + 1, 1)
    assert kernels.choice_fits(kernels.MOST_PAGES // 8, 8) and not kernels.choice_fits(kernels.MOST_PAGES // 4, 5)
