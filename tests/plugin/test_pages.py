"""Pages of a paged cache: their bounds, and those that a token reads, in C, in torch, and as kvsieve's own readers."""

from __future__ import annotations

import pytest
import torch

from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.kernels.cpu import pages as compiled
from kvsieve.methods.hsa import HSA
from kvsieve.methods.quest import Quest
from kvsieve.methods.readers import Setting
from kvsieve.types import AttentionQueries
from kvsieve_vllm import pages
from kvsieve_vllm.pages import PageBounds, choose_pages
from kvsieve_vllm.reading import PageReading, PagesRead

PAGE, HEADS, GROUPS, DIM = 8, 2, 3, 16
NO_C = "the C kernels are not there"


@pytest.fixture(params=["torch", "c"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(pages, "usable", lambda bounds: False)
    elif compiled.built().reason is not None:
        pytest.skip(f"{NO_C}: {compiled.built().reason}")
    return request.param


def filled(sizes: list[int], dtype: torch.dtype = torch.float32, parts: int = 1, means: bool = False):
    """Keys of requests in pages that lie anywhere, their table, and what is known of the pages or their parts."""
    torch.manual_seed(0)
    width = -(-max(sizes) // PAGE)
    free = torch.randperm(60) + 1
    table = free[: len(sizes) * width].view(len(sizes), width)
    bounds = PageBounds(61, HEADS, DIM, PAGE, torch.zeros(1, dtype=dtype), parts=parts, means=means)
    keys = [torch.randn(size, HEADS, DIM).to(dtype) for size in sizes]
    for own, pages_of in zip(keys, table, strict=True):
        slots = (pages_of[:, None] * PAGE + torch.arange(PAGE)).flatten()[: len(own)]
        # A chunk, then token by token.
        part = len(own) // 2
        bounds.update(own[:part], slots[:part])
        for at in range(part, len(own)):
            bounds.update(own[at : at + 1], slots[at : at + 1])
    return keys, table.to(torch.int32), bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_are_those_of_each_pages_keys(way, dtype):
    (keys, short), table, bounds = filled([43, 17], dtype)
    for own, pages_of in ((keys, table[0]), (short, table[1])):
        for page, part in zip(pages_of.tolist(), own.split(PAGE), strict=False):
            assert bounds.table[page].equal(torch.stack([part.amax(0), part.amin(0)], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2])
def test_sums_are_those_of_each_parts_keys(way, dtype, parts):
    (keys, short), table, bounds = filled([43, 17], dtype, parts, means=True)
    assert bounds.table.dtype == torch.float32 and bounds.page == PAGE // parts
    for own, pages_of in ((keys, table[0]), (short, table[1])):
        places = (pages_of[:, None] * parts + torch.arange(parts)).flatten().tolist()
        for place, part in zip(places, own.split(PAGE // parts), strict=False):
            torch.testing.assert_close(bounds.table[place, :, 0], part.float().sum(0))


def test_a_page_that_begins_anew_forgets_and_padding_goes_nowhere(way):
    _, table, bounds = filled([43])
    page, new = int(table[0, 1]), torch.randn(3, HEADS, DIM)
    others = bounds.table.clone()
    bounds.update(new, torch.tensor([page * PAGE, -1, page * PAGE + 1]))
    assert bounds.table[page].equal(torch.stack([new[[0, 2]].amax(0), new[[0, 2]].amin(0)], 1))
    others[page] = bounds.table[page]
    assert bounds.table.equal(others)


def test_keys_may_be_part_of_a_wider_row(way):
    wide = torch.randn(5, 3 * HEADS * DIM)
    keys = wide[:, HEADS * DIM : 2 * HEADS * DIM].view(5, HEADS, DIM)
    bounds = PageBounds(4, HEADS, DIM, PAGE, wide)
    bounds.update(keys, torch.arange(5) + PAGE)
    assert bounds.table[1].equal(torch.stack([keys.amax(0), keys.amin(0)], 1))


def chosen_pages(sizes: list[int], counts: list[int], question: torch.Tensor, table, bounds) -> list[list[list[int]]]:
    """Indices in the table of the pages that each request's heads read."""
    found = choose_pages(
        bounds.table, question, table, torch.tensor(sizes, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32),
        max(counts), PAGE, bounds.parts,
    )  # fmt: skip
    out = []
    for request, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        held = min(count, -(-size // PAGE))
        assert (found[request, :, :held] % HEADS == torch.arange(HEADS)[:, None]).all()
        places = {page: place for place, page in enumerate(table[request].tolist())}
        out.append([[places[page // HEADS] for page in head[:held].tolist()] for head in found[request]])
    return out


@pytest.mark.parametrize(
    ("reader", "channels"),
    [(Quest(budget=32, page=PAGE), None), (HSA(budget=32), None), (HSA(budget=32), DIM), (HSA(budget=32), 5)],
)
def test_pages_are_those_whose_entries_kvsieves_own_readers_read(way, reader, channels):
    sizes, counts = [96, 93], [4, 3]
    keys, table, bounds = filled(sizes)
    query = torch.randn(2, HEADS, GROUPS, DIM)
    asked = None if channels is None else torch.tensor([channels] * 2)
    found = chosen_pages(sizes, counts, reader.question(query, 0.25, PAGE, asked), table, bounds)
    for own, asking, pages_read, size, count in zip(keys, query, found, sizes, counts, strict=True):
        rows = own.transpose(0, 1).reshape(-1, DIM)
        kv_rows = KVRows(rows, rows, None, torch.arange(HEADS) * size, 1, size)
        # As many entries as the pages have; the newest page's, of which these readers take only some, are left out.
        setting = Setting(size, count * PAGE, PAGE, channels or DIM)
        entries = reader.choose(AttentionQueries(asking, 0.25), kv_rows, {}, setting).entries
        newest = (size - 1) // PAGE
        for read, expected in zip(pages_read, entries, strict=True):
            assert read == sorted(read) and read[-1] == newest
            best = [page for page in dict.fromkeys((expected // PAGE).tolist()) if page != newest]
            assert set(read[:-1]) == set(best[: count - 1])


@pytest.mark.parametrize("means", [False, True], ids=["bounds", "means"])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_page_weighs_what_the_best_of_its_parts_does(way, parts, means):
    sizes, counts, small = [96, 91], [4, 3], PAGE // parts
    keys, table, bounds = filled(sizes, parts=parts, means=means)
    query = torch.randn(2, HEADS, GROUPS, DIM)
    question = Quest(budget=64, means=means).question(query, 0.5, small, None)
    found = chosen_pages(sizes, counts, question, table, bounds)
    for own, asking, pages_read, size, count in zip(keys, query, found, sizes, counts, strict=True):
        for head, read in enumerate(pages_read):
            pieces, weights = own[:, head].split(small), torch.zeros(-(-size // small))
            for q in asking[head]:
                one = [
                    float(q @ each.mean(0) if means else torch.maximum(q * each.amax(0), q * each.amin(0)).sum())
                    for each in pieces
                ]
                number = torch.tensor([len(each) for each in pieces])
                shares = (0.5 * torch.tensor(one)).exp()
                weights += shares / (shares * number).sum()
            best = [float(each.max()) for each in weights.split(parts)][:-1]
            order = sorted(range(len(best)), key=lambda page: -best[page])
            assert read == [*sorted(order[: count - 1]), (size - 1) // PAGE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("means", [False, True], ids=["bounds", "means"])
def test_sizes_that_the_compiler_knows_choose_what_torch_does(monkeypatch, means, dim, dtype):
    """Of 64, 128 and 256 numbers of a page; more pages than are fetched ahead, parts of blocks among them."""
    if compiled.built().reason is not None:
        pytest.skip(f"{NO_C}: {compiled.built().reason}")
    torch.manual_seed(dim)
    parts, sizes = 2, torch.tensor([30 * PAGE, 21 * PAGE - 3], dtype=torch.int32)
    bounds = PageBounds(61, HEADS, dim, PAGE, torch.zeros(1, dtype=dtype), parts=parts, means=means)
    bounds.update(torch.randn(60 * PAGE, HEADS, dim).to(dtype), torch.arange(60 * PAGE) + PAGE)
    query = torch.randn(2, HEADS, GROUPS, dim)
    question = Quest(budget=64, means=means).question(query, 0.2, bounds.page, None)
    table = (torch.randperm(60) + 1).view(2, 30).to(torch.int32)
    given = bounds.table, question, table, sizes, torch.tensor([6, 5], dtype=torch.int32), 6, PAGE, parts
    in_c = choose_pages(*given)
    monkeypatch.setattr(pages, "usable", lambda bounds: False)
    in_torch = choose_pages(*given)
    assert torch.equal(in_c[0], in_torch[0]) and torch.equal(in_c[1, :, :5], in_torch[1, :, :5])


def test_a_short_request_reads_all_its_pages(way):
    sizes, counts = [96, 13], [3, 9]
    _, table, bounds = filled(sizes)
    question = Quest(budget=64).question(torch.randn(2, HEADS, GROUPS, DIM), 1.0, PAGE, None)
    found = chosen_pages(sizes, counts, question, table, bounds)
    assert [len(head) for head in found[0]] == [3, 3] and found[1] == [[0, 1], [0, 1]]


def test_a_budget_in_pages():
    def read(reader, length):
        return PageReading(reader, 32, 64, 1).read(length, length)

    assert read(Quest(budget=256), 8000) == PagesRead(4, 4 * 32, 64)
    assert read(Quest(budget=256, page=32), 8001) == PagesRead(8, 7 * 32 + 1, 64)
    assert read(Quest(budget="10%", page=4), 8000).pages == 25
    assert read(HSA(budget=512), 8192) == PagesRead(8, 8 * 32, 64)
    assert read(HSA(budget=512), 65536) == PagesRead(8, 8 * 32, 16)
    assert read(HSA(budget="1%"), 500).pages == 2


@pytest.mark.parametrize(
    "reader",
    [
        *(Quest(budget=256), Quest(budget=256, page=16), Quest(budget="10%"), Quest(budget="10%", page=16, means=True)),
        *(HSA(budget=512), HSA(budget="5%"), HSA(budget=256, after_eviction=True)),
    ],
)
def test_a_plan_reads_as_many_entries_as_in_the_library(reader):
    """Exactly read are as many as whole pages hold of them, and what is read whole there is read whole here."""
    reading = PageReading(reader, 32, 64, 2)
    for length in (1, 40, 255, 256, 257, 511, 512, 513, 5000, 40000):
        setting, read = reader.setting(ReadFacts(1, 2, length, 0, 64)), reading.read(length, length)
        if reader.reads_all(setting, length):
            assert read.entries == length
        else:
            assert read.pages == max(setting.count // 32, 2)
            assert read.channels == (64 if isinstance(reader, Quest) else reader.parameters(
                setting.tokens, ReadFacts(1, 2, length, 0, 64, 32)).channels)  # fmt: skip


def test_layers_that_read_everything():
    assert PageReading(Quest(budget=64, skip_layers=2), 32, 64, 4).layers == (2, 3)
    some = PageReading(Quest(budget=64, skip_layers=(0, -1)), 32, 64, 4)
    assert some.layers == (1, 2) and not some.everywhere and PageReading(Quest(budget=64), 32, 64, 4).everywhere


def test_sums_of_packed_pages(way):
    _, table, bounds = filled([43], parts=2, means=True)
    keys = torch.randn(HEADS, 2 * PAGE, DIM)
    bounds.replace(table[0, :2].long(), keys)
    places = [2 * page + part for page in table[0, :2].tolist() for part in (0, 1)]
    for place, part in zip(places, keys.split(PAGE // 2, 1), strict=True):
        torch.testing.assert_close(bounds.table[place, :, 0], part.sum(1))


def test_bounds_of_packed_pages(way):
    _, table, bounds = filled([43])
    keys = torch.randn(HEADS, 2 * PAGE, DIM)
    bounds.replace(table[0, :2].long(), keys)
    for page, part in zip(table[0, :2].tolist(), keys.split(PAGE, 1), strict=True):
        assert bounds.table[page].equal(torch.stack([part.amax(1), part.amin(1)], 1))
