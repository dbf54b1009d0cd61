"""Page tables grow as entries come and bound their logits; the best entries are those of the best pages."""

from __future__ import annotations

import pytest
import torch

from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.page_means import PageMeans
from kvsieve.core.page_weights import best_entries, page_softmax
from kvsieve.core.pages import PageTable


def kv_rows(keys, size):
    """KV rows over keys [X, N, D], of which the first `size` are stored."""
    rows = torch.arange(len(keys))
    flat = keys.flatten(0, 1)
    return KVRows(flat, flat, None, rows * keys.shape[1], 1, size)


@pytest.mark.parametrize("page", [1, 2, 3, 7, 50])
def test_incremental_equals_recomputed(page):
    keys = torch.randn(2, 41, 5, dtype=torch.float64)
    table = PageTable(page)
    for size in (4, 5, 6, 7, 20, 21, 40, 41):
        table.update(kv_rows(keys, size))
        bounds = table.bounds()
        assert bounds.shape[-1] == -(-size // page)
        for at in range(bounds.shape[-1]):
            members = keys[:, at * page : min((at + 1) * page, size)]
            assert torch.equal(bounds[:, 0, :, at], members.amax(1))
            assert torch.equal(bounds[:, -1, :, at], members.amin(1))


@pytest.mark.parametrize("page", [1, 3, 50])
def test_means_are_those_of_each_pages_keys(page):
    keys, query = torch.randn(2, 41, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    table, at_once = PageMeans(page), PageMeans(page)
    at_once.update(kv_rows(keys, 41))
    for size in (4, 5, 6, 7, 20, 21, 40, 41):
        rows = kv_rows(keys, size)
        table.update(rows)
        scores, metadata_bytes = table.bound(query, rows)
        means = torch.stack([part.mean(1) for part in keys[:, :size].split(page, 1)], 2)
        torch.testing.assert_close(scores, query @ means)
        assert metadata_bytes == means.numel() * 8
    assert table.bounds().equal(at_once.bounds())


def test_means_of_half_precision_keys_lose_nothing():
    keys = (1 + torch.rand(2, 300, 5) / 2**6).bfloat16()
    table = PageMeans(256)
    for size in range(1, 301):
        table.update(kv_rows(keys, size))
    ones = torch.eye(5)[None].expand(2, -1, -1)
    scores, _ = table.bound(ones, kv_rows(keys, 300))
    wanted = torch.stack([keys[:, :256].float().mean(1), keys[:, 256:].float().mean(1)], 2)
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=0)
    # A key of two bytes a number is read, and a sum of four.
    assert table.update_bytes(299, 300) == 2 * 5 * (2 + 4) and table.update_bytes(256, 257) == 2 * 5 * 2


def test_a_page_bounds_the_logits_of_its_entries():
    keys, query = torch.randn(3, 40, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    table = PageTable(6)
    table.update(kv_rows(keys, 40))
    greatest, least = table.bounds().unbind(1)
    bound = torch.maximum(query[..., None] * greatest, query[..., None] * least).sum(1)
    logits = (keys @ query[..., None])[..., 0]
    for at in range(40):
        assert bool((bound[:, at // 6] >= logits[:, at] - 1e-12).all())


def test_chosen_channels_of_all_pages():
    keys = torch.randn(2, 10, 6)
    table = PageTable(4)
    table.update(kv_rows(keys, 10))
    channels = torch.tensor([[5, 0], [2, 3]])
    greatest = torch.tensor([[True, False], [False, True]])
    rows = table.rows(channels + ~greatest * 6)
    for row in range(2):
        for i in range(2):
            half = 0 if greatest[row, i] else 1
            assert torch.equal(rows[row, i], table.bounds()[row, half, channels[row, i]])


def test_entries_of_a_page_share_its_softmax_weight():
    scores = torch.randn(2, 4, dtype=torch.float64)
    for size in (10, 11, 12):
        whole = scores.repeat_interleave(3, -1)[..., :size].softmax(-1)
        torch.testing.assert_close(page_softmax(scores, size, 3) / 3, whole[..., ::3])


def test_the_cut_falls_inside_a_page_and_short_pages_are_made_up_for():
    weights = torch.tensor([0.1, 0.9, 0.5, 0.8])
    assert best_entries(weights, 12, 3, 5, False).tolist() == [3, 4, 5, 9, 10]
    assert best_entries(weights, 10, 3, 5, False).tolist() == [3, 4, 5, 9, 6]
    assert sorted(best_entries(weights, 11, 3, 4, True).tolist()) == [3, 4, 9, 10]
    assert best_entries(weights, 4, 1, 2, True).tolist() == [3, 1]
    assert sorted(best_entries(weights, 10, 3, 10, True).tolist()) == list(range(10))
    # Of a newest page that is longer than half of what is read, its end.
    assert sorted(best_entries(weights[:3], 29, 10, 4, True).tolist()) == [10, 11, 27, 28]
    assert sorted(best_entries(torch.tensor([0.9, 0.5, 0.8]), 29, 10, 4, True).tolist()) == [0, 1, 27, 28]
    assert sorted(best_entries(weights[:3], 21, 10, 4, True).tolist()) == [10, 11, 12, 20]


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("page", [1, 3, 4, 7, 25])
@pytest.mark.parametrize("kind", [PageTable, PageMeans])
def test_a_length_on_the_device_gives_what_the_same_entries_give(kind, page, newest):
    """Entries are taken in one at a time, in buffers of fixed size; what lies beyond the end is never chosen."""
    keys, query = torch.randn(2, 41, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    fixed, grown = kind(page), kind(page)
    fixed.update(kv_rows(keys, 20))
    fixed.make_room(41)
    table = fixed.tensors()[0]
    for size in range(21, 40):
        held = kv_rows(keys, 41)
        held.length = DeviceLength(torch.tensor(size))
        fixed.update(held)
        grown.update(kv_rows(keys, size))
        pages = grown.bounds().shape[-1]
        assert torch.equal(fixed.bounds(size), grown.bounds()) and fixed.tensors()[0] is table
        scores, metadata_bytes = fixed.bound(query, held)
        wanted, before = grown.bound(query, kv_rows(keys, size))
        assert metadata_bytes // -(-41 // page) == before // pages
        weights = page_softmax(scores, 41, page, held.length)
        wanted = page_softmax(wanted, size, page)
        torch.testing.assert_close(weights[..., :pages], wanted)
        assert not weights[..., pages:].any()
        chosen = best_entries(weights, 41, page, 9, newest, held.length)
        assert torch.equal(chosen.sort(-1).values, best_entries(wanted, size, page, 9, newest).sort(-1).values)
    # Weights may be negative (Quest's bounds), those of pages beyond the end anything.
    held = DeviceLength(torch.tensor(8))
    for page, wanted in ((1, [1, 2]), (3, [3, 4, 5, 6, 7])):
        weights = torch.tensor([-3.0, -1.0, -2.0, -5.0, -4.0, -7.0, -6.0, -9.0, 0.0, 0.0, 0.0, 0.0])[: 12 // page]
        weights = weights if page == 1 else weights.index_fill(0, torch.tensor([3]), 0.0)
        found = best_entries(weights.clone(), 12, page, len(wanted), False, held)
        assert sorted(found.tolist()) == wanted
