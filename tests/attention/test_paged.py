"""Sparse reading by one compiled call gives what choosing, gathering and attending by torch's operations give."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attend import AttentionTerms, asking, by
from kvsieve.attention import AttentionRequest, Reading, ReadRows, SharedChoices, Sharing, attend, executors
from kvsieve.attention.paged import CompiledReading, why_not_compiled
from kvsieve.cache import DenseStore, group_rows, keep
from kvsieve.cache.contract import View
from kvsieve.core.kv_rows import Choice
from kvsieve.core.selection import pack_ragged
from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.forward.sparse_read import count
from kvsieve.kernels.cpu import reading as native
from kvsieve.methods import HSA, ExactTopK, Quest, SparQ
from kvsieve.methods.readers import Setting

pytestmark = pytest.mark.skipif(native.built().reason is not None, reason=str(native.built().reason))

HEADS, GROUPS, DIM = 2, 3, 64

READERS = {
    "quest": (Quest(budget=64), Setting(64, 33, 5)),
    "quest-entries": (Quest(budget=64, newest=False), Setting(64, 20, 1)),
    "quest-long-pages": (Quest(budget=64), Setting(64, 30, 70)),
    "hsa": (HSA(budget=64), Setting(64, 37, 4, 9)),
    "hsa-any": (HSA(budget=64, newest=False), Setting(64, 40, 7, 64)),
    "hsa-entries": (HSA(budget=64), Setting(64, 1, 1, 3)),
    "sparq": (SparQ(budget=64), Setting(64, 32, 1, 5)),
    "sparq-no-mean": (SparQ(budget=64, mean_value=False, newest=False), Setting(64, 32, 1, 1)),
}


def dense(
    length: int, batch: int = 1, valid=None, dtype=torch.float32, dim: int = DIM, wide: int = DIM, tokens=None
) -> DenseStore:
    torch.manual_seed(length + dim)
    store = DenseStore()
    keys, values = torch.randn(batch, HEADS, length, dim) + 0.1, torch.randn(batch, HEADS, length, wide)
    tokens = torch.arange(length) if tokens is None else tokens
    store.append(keys.to(dtype), values.to(dtype), tokens[None], valid, reserve=2)
    return store


def another(store, new=1) -> None:
    batch, (dim, wide) = len(store.lengths), store.dims
    index = max(store.lengths) + torch.arange(new)[None]
    dtype = store.buffers()[0].dtype
    store.append(torch.randn(batch, HEADS, new, dim).to(dtype), torch.randn(batch, HEADS, new, wide).to(dtype), index)


def by_torch(reader, grouped, store, query, scale, terms, whole=()):
    """What choosing and attending give, one group of KV rows after another."""
    queries = asking(query, scale, terms).per_kv_row(grouped.heads)
    out = query.new_empty(*queries.query.shape[:2], store.dims[1])
    for group in grouped.groups:
        mine = slice(None) if group.kv_rows is None else group.kv_rows
        kv_rows, asked = grouped.kv_rows(store, group), queries.at(mine)
        if group.setting in whole:
            choice = Choice(kv_rows.span(0, kv_rows.size))
        else:
            choice = reader.choose(asked, kv_rows, group.state, group.setting)
        out[mine] = attend(AttentionRequest(asked, kv_rows, choice))
    return out.view(*query.shape[:2], 1, -1)


def compare(reader, settings, store, view=None, terms=None, whole=(), steps=3, close=1e-5) -> None:
    """The same entries come, one after another, and both read."""
    wanted_of, grouped = group_rows(store, view, settings), group_rows(store, view, settings)
    recipes = [None if group.setting in whole else reader.recipe(group.setting) for group in grouped.groups]
    heads = grouped.heads * GROUPS
    ours = CompiledReading(store, grouped, recipes, heads)
    for _ in range(steps):
        query = torch.randn(len(store.lengths), heads, 1, store.dims[0]).to(store.buffers()[0].dtype)
        assert why_not_compiled(query, store, [each for each in recipes if each is not None]) is None
        wanted = by_torch(reader, wanted_of, store, query, 0.2, terms, whole)
        found = ours.attend(asking(query, 0.2, terms), store)
        assert found.dtype == query.dtype
        torch.testing.assert_close(found, wanted, atol=close, rtol=close)
        # Asked again about the same entries, it takes nothing in twice.
        assert torch.equal(ours.attend(asking(query, 0.2, terms), store), found)
        for group, other in zip(grouped.groups, wanted_of.groups, strict=True):
            assert group.state.keys() == other.state.keys()
            for mine, theirs in zip(group.state.values(), other.state.values(), strict=True):
                assert mine.size == theirs.size
            if "pages" in group.state:
                assert torch.equal(group.state["pages"].bounds(), other.state["pages"].bounds())
        another(store)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("length", [71, 130])
def test_every_reader_as_entries_come(name, length):
    reader, setting = READERS[name]
    # Long enough for buffers and tables to be replaced.
    compare(reader, [setting], dense(length), steps=40 if name == "sparq" else 4)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("ragged", [False, True], ids=["", "ragged"])
def test_several_tokens_choose_one_after_another(name, ragged):
    """In C and by torch; some are taken back, and layers that share the entries read them again."""
    reader, setting = READERS[name]
    store = dense(90, 2)
    if ragged:
        kept = torch.rand(2, HEADS, 90, generator=torch.Generator().manual_seed(3)) < 0.9
        store = keep(store, pack_ragged(kept), reserve=3)
    ours, theirs, alone = (group_rows(store, None, [setting] * 2) for _ in range(3))
    by_c, by_group = (Reading(reader, grouped, (False,) * len(grouped.groups)) for grouped in (ours, theirs))
    torch.manual_seed(91)
    for new, taken in ((5, 3), (4, 0), (1, 0), (30, 30), (2, 1)):
        another(store, new)
        query = torch.randn(2, HEADS * GROUPS, new, DIM)
        wanted = []
        for at in range(new):
            before = store.share()
            before.drop_last([new - 1 - at] * 2)
            wanted.append(by_torch(reader, alone, before, query[:, :, at : at + 1], 0.2, None))
        for name, reading in (("C, in one call", by_c), ("group by group", by_group)) * 2:
            request = AttentionRequest(asking(query, 0.2), ReadRows(reading, store))
            assert executors(request)[0].why_not(request) is None
            torch.testing.assert_close(by(name, request), torch.cat(wanted, 2), atol=1e-5, rtol=1e-5)
            for later in range(new)[::-1]:
                count(reading, store, Reads(), later)
        store.drop_last([taken] * 2)
        for grouped in (ours, theirs, alone):
            assert grouped.drop_last(store)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", ["quest", "hsa", "hsa-any", "sparq-no-mean"])
def test_a_layer_reads_what_another_has_chosen(name, padded, new):
    """The anchor's choices are noted, and read by another layer, with other tokens and heads, as by torch."""
    reader, setting = READERS[name]
    reader = dataclasses.replace(reader, share=2)
    valid = torch.ones(2, 90, dtype=torch.bool)
    if padded:
        valid[1, :7] = False
    # The other layer stores other tokens from some place on.
    tokens = torch.cat([torch.arange(40), torch.arange(43, 93)])
    stores = [dense(90, 2, valid if padded else None, tokens=one) for one in (None, tokens)]
    readings = []
    for store in stores:
        of_layer = [group_rows(store, None, [setting] * 2) for _ in range(2)]
        for group in [group for grouped in of_layer for group in grouped.groups]:
            group.note_tokens(store)
        readings.append([Reading(reader, grouped, (False,) * len(grouped.groups)) for grouped in of_layer])
    for _ in range(3):
        for store in stores:
            another(store, new)
        query = torch.randn(2, 2, HEADS * GROUPS, new, DIM)
        outs = []
        for at, executor in enumerate(("C, in one call", "group by group")):
            choices = SharedChoices()
            for layer, store in enumerate(stores):
                sharing = Sharing(choices, layer, 0, 5, (1, 0) if layer else None)
                stored = ReadRows(readings[layer][at], store, None, sharing)
                request = AttentionRequest(asking(query[layer], 0.2), stored)
                assert executors(request)[0].why_not(request) is None
                outs.append(by(executor, request))
                for later in range(new)[::-1]:
                    count(readings[layer][at], store, Reads(), later)
            shared = readings[1][at].shared
            assert shared is not None and shared.source is readings[0][at] and shared.entries[0] is not None
            assert all(not group.state for group in readings[1][at].grouped.groups)
        torch.testing.assert_close(outs[0], outs[2], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(outs[1], outs[3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["quest", "hsa", "sparq"])
def test_bfloat16_differs_by_rounding(name):
    reader, setting = READERS[name]
    compare(reader, [setting], dense(150, dtype=torch.bfloat16), close=2e-2)


@pytest.mark.parametrize("name", ["quest", "hsa", "sparq"])
@pytest.mark.parametrize("dim, wide", [(128, 128), (20, 24), (6, 300)])
def test_any_size_of_heads(name, dim, wide):
    reader, setting = READERS[name]
    compare(reader, [dataclasses.replace(setting, channels=min(setting.channels, 5))], dense(90, dim=dim, wide=wide))


@pytest.mark.parametrize("name", READERS)
def test_rows_of_different_length_are_one_call(name):
    reader, setting = READERS[name]
    valid = torch.ones(3, 130, dtype=torch.bool)
    valid[0, :40], valid[2, :11] = False, False
    other = dataclasses.replace(setting, count=setting.count // 2 + 1)
    store = dense(130, 3, valid)
    compare(reader, [setting, other, setting], store, whole=(other,))


@pytest.mark.parametrize("name", ["quest", "hsa", "sparq"])
def test_heads_that_keep_different_numbers(name):
    reader, setting = READERS[name]
    kept = torch.zeros(2, HEADS, 120, dtype=torch.bool)
    for at, size in enumerate((100, 77, 90, 104)):
        kept.view(4, 120)[at, :size] = True
    store = keep(dense(120, 2), pack_ragged(kept), reserve=3)
    assert store.is_ragged
    compare(reader, [setting] * 2, store)


@pytest.mark.parametrize("name", ["quest", "hsa"])
def test_a_view_is_read_alone(name):
    reader, setting = READERS[name]
    store = dense(140, 2)
    slots = torch.stack([torch.randperm(140)[:90].sort().values for _ in range(4)]).view(2, 2, 90)
    compare(reader, [setting] * 2, store, View(slots, None, 140))


@pytest.mark.parametrize("name", ["quest", "hsa", "sparq", "sparq-no-mean"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_caps_and_sinks(name, cap):
    reader, setting = READERS[name]
    sinks = torch.randn(HEADS * GROUPS)
    compare(reader, [setting], dense(90), terms=AttentionTerms(cap, sinks))
    compare(reader, [setting], dense(90), terms=AttentionTerms(cap))


def test_equal_weights_take_the_earliest():
    """All pages alike: which are read is up to ties, how many is not."""
    store = dense(100)
    store.buffers()[0].fill_(0.5)
    store.buffers()[1].copy_(torch.arange(store.capacity)[:, None].expand(-1, DIM))
    grouped = group_rows(store, None, [Setting(64, 10, 4)])
    ours = CompiledReading(store, grouped, [Quest(budget=64).recipe(Setting(64, 10, 4))], HEADS * GROUPS)
    out = ours.attend(asking(torch.ones(1, HEADS * GROUPS, 1, DIM), 0.2), store)
    # The newest page's four, then six of the first.
    torch.testing.assert_close(out, torch.full_like(out, (sum(range(96, 100)) + sum(range(6))) / 10))


def test_what_is_not_compiled_says_why():
    store, query = dense(80), torch.randn(1, HEADS * GROUPS, 1, DIM)
    setting = Setting(64, 32, 4)
    assert Quest(budget=64, per_query_head=True).recipe(setting) is None
    assert Quest(budget=64, means=True).recipe(setting) is None
    assert SparQ(budget=64, per_query_head=True).recipe(setting) is None
    assert "not compiled" in why_not_compiled(query, store, [ExactTopK(budget=64).recipe(setting)])
    assert "bfloat16" in why_not_compiled(query.bfloat16(), store, [])
    assert "float64" in why_not_compiled(query.double(), dense(80, dtype=torch.float64), [])
    assert why_not_compiled(query, store, [Quest(budget=64).recipe(setting)]) is None
