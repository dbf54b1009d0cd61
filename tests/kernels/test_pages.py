"""The page kernels equal products with the table's rows, and the table that is made at once."""

from __future__ import annotations

import pytest
import torch

from kvsieve import kernels
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.pages import PageTable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Types with numbers of query heads.
MIXES = {"fp32-G1": (torch.float32, 1), "bf16-G3": (torch.bfloat16, 3), "fp16-G17": (torch.float16, 17)}


def table_of(keys, page):
    table = PageTable(page)
    flat = keys.flatten(0, 1)
    table.update(KVRows(flat, flat, None, torch.arange(len(keys)) * keys.shape[1], 1, keys.shape[1]))
    return table


@pytest.mark.parametrize("dtype, groups", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("chosen", [1, 5, 37])
@pytest.mark.parametrize("page", [1, 3])
def test_scores_in_chosen_channels(dtype, groups, chosen, page):
    torch.manual_seed(chosen)
    table = table_of(torch.randn(2, 500, 40).to(dtype), page)
    channels = torch.rand(2, 40).argsort(-1)[:, :chosen]
    greatest = torch.rand(2, chosen) > 0.5
    weights = 3 * torch.randn(2, groups, chosen)
    at = channels if table.halves == 1 else channels + (~greatest) * 40
    ours = kernels.page_scores(table.bounds(), weights, at)
    assert ours.dtype == torch.float32
    rows = table.rows(at).double()
    # A bfloat16 table's weights keep 16 bits.
    bits = 15 if dtype == torch.bfloat16 else 20
    most = weights.double().abs() @ rows.abs() * 2**-bits + 1e-6
    assert bool(((ours - weights.double() @ rows).abs() <= most).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("page", [1, 3])
def test_bounds_of_quest(dtype, page):
    keys, query = torch.randn(2, 500, 40).to(dtype), torch.randn(2, 3, 40)
    table = table_of(keys, page).bounds()
    greatest, least = table[:, 0].float(), table[:, -1].float()
    each = torch.maximum(query[..., None] * greatest[:, None], query[..., None] * least[:, None])
    torch.testing.assert_close(kernels.page_bounds(table, query), each.sum(2), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("pages", [1, 128, 129, 150])
def test_pages_that_are_not_there(pages):
    table, weights = torch.randn(2, 2, 4, 150), torch.randn(2, 3, 8)
    theirs = weights @ table.flatten(1, 2)
    table[..., pages:] = float("nan")
    ours = kernels.page_scores(table[..., :pages], weights)
    torch.testing.assert_close(ours, theirs[..., :pages], atol=1e-5, rtol=1e-5)
    # The end of the last row is the end of memory.
    ours = kernels.page_scores(table[..., pages - 1 :], weights, length=1)
    torch.testing.assert_close(ours[..., 0], theirs[..., pages - 1], atol=1e-5, rtol=1e-5)
    for count in (pages, torch.tensor(pages), torch.tensor([pages], dtype=torch.int32)):
        ours = kernels.page_scores(table, weights, length=count)
        torch.testing.assert_close(ours[..., :pages], theirs[..., :pages], atol=1e-5, rtol=1e-5)
        assert ours[..., pages:].eq(float("-inf")).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("page", [1, 3])
@pytest.mark.parametrize("on_device", [False, True], ids=["int", "device"])
def test_entry_after_entry_makes_the_same_table(dtype, page, on_device):
    keys = torch.randn(3, 20, 5).to(dtype)
    table = torch.full((3, 1 if page == 1 else 2, 5, 21), 7.0).to(dtype)
    # The first four of each are listed, and lie the other way round.
    body = torch.arange(3)[:, None] * 20 + torch.tensor([3, 2, 1, 0])
    flat = torch.cat([keys[:, :4].flip(1), keys[:, 4:]], 1).flatten(0, 1)
    for length in range(1, 21):
        size, known = (20, DeviceLength(torch.tensor(length))) if on_device else (length, None)
        kernels.update_pages(table, KVRows(flat, flat, body, body[:, -1] + 4, 1, size, known), page)
    theirs = table_of(keys, page).bounds()
    assert torch.equal(table[..., : theirs.shape[-1]], theirs)
    assert table[..., theirs.shape[-1] :].eq(7).all()


@pytest.mark.parametrize("dtype, groups", MIXES.values(), ids=MIXES)
def test_scores_of_pages_that_lie_anywhere(dtype, groups):
    torch.manual_seed(0)
    bounds, page = torch.randn(90, 3, 2, 40).to(dtype), 8
    sizes = torch.tensor([8 * 70 - 3, 8 * 64, 5], dtype=torch.int32)
    table = torch.stack([torch.randperm(90)[:75] for _ in sizes]).to(torch.int32)
    question = torch.randn(3, 3, groups, 2, 40)
    ours = kernels.paged_scores(bounds, question, table[:, :72], sizes, page)
    held = bounds[table[:, :72].long()].double().flatten(3)
    theirs = torch.einsum("rhgc,rphc->rhgp", question.flatten(3).double(), held)
    for row, there in enumerate((70, 64, 1)):
        torch.testing.assert_close(ours[row, ..., :there].double(), theirs[row, ..., :there], atol=2e-3, rtol=1e-4)
        assert ours[row, ..., there:].eq(float("-inf")).all()
