"""What readers choose, and what comes of reading it: golden values, and slow references written from the papers."""

from __future__ import annotations

import math

import pytest
import torch

import kvsieve
from attend import asking, sparse_attention
from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.core.page_weights import best_entries
from kvsieve.errors import PlanError
from kvsieve.methods import HSA, ExactTopK, PerTurn, Quest, RocketEviction, SnapKV, SparQ
from kvsieve.methods.hsa import hsa_setting, stored_entries
from kvsieve.methods.readers import Setting
from layers import context, golden


def kv_rows_of(keys, values):
    """KV rows over keys and values [X, N, D]."""
    size = keys.shape[1]
    return KVRows(keys.flatten(0, 1), values.flatten(0, 1), None, torch.arange(len(keys)) * size, 1, size)


def read(reader, query, keys, values, setting, scale=None):
    """entries and output [X, G, D] of one step from nothing."""
    kv_rows = kv_rows_of(keys, values)
    scale = keys.shape[-1] ** -0.5 if scale is None else scale
    choice = reader.choose(asking(query, scale), kv_rows, {}, setting)
    return choice, sparse_attention(query, kv_rows, choice, scale=scale)


@pytest.fixture(params=[1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def step(request):
    """query [2, G, D], keys and values [2, N, D] of odd sizes."""
    torch.manual_seed(request.param)
    return [torch.randn(2, size, 6, dtype=torch.float64) for size in (request.param, 47, 47)]


# Slow references: one KV row, plain loops.


def softmax(numbers):
    most = max(numbers)
    powers = [math.exp(number - most) for number in numbers]
    return [power / sum(powers) for power in powers]


def attend(q, keys, values, entries, scale):
    weights = softmax([float(q @ keys[j]) * scale for j in entries])
    return sum(weight * values[j] for weight, j in zip(weights, entries, strict=True))


def by_weight(weights, count, first=()):
    order = sorted(range(len(weights)), key=lambda j: (j not in first, -weights[j], j))
    return sorted(order[:count])


def newest_entries(size, page, count):
    """The newest page, of it the newest entries where it is longer than half of what is read."""
    return range(size - min((size - 1) % page + 1, count // 2), size)


def slow_hsa(query, keys, page, channels, count, newest):
    size, dim = keys.shape
    largest = sorted(range(dim), key=lambda d: -sum(abs(float(q[d])) for q in query))[:channels]
    members = [keys[m : m + page] for m in range(0, size, page)]
    weights = [0.0] * size
    for q in query:
        part = sum(abs(float(q[d])) for d in largest) / float(q.abs().sum())
        estimates = []
        for rows in members:
            bound = {d: rows[:, d].max() if float(query[:, d].sum()) > 0 else rows[:, d].min() for d in largest}
            estimates.append(float(sum(q[d] * bound[d] for d in largest)) / math.sqrt(dim * part))
        for j, share in enumerate(softmax([estimates[j // page] for j in range(size)])):
            weights[j] += share
    last = newest_entries(size, page, count) if newest else ()
    return by_weight(weights, count, last)


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize(
    "page, channels, count", [(1, 3, 11), (3, 2, 7), (4, 6, 20), (5, 1, 46), (9, 2, 5), (40, 3, 11)]
)
def test_hsa(step, page, channels, count, newest):
    query, keys, values = step
    choice, out = read(HSA(budget=16, newest=newest), query, keys, values, Setting(16, count, page, channels))
    for row in range(2):
        wanted = slow_hsa(query[row], keys[row], page, channels, count, newest)
        assert sorted(choice.entries[row].tolist()) == wanted
        for g, q in enumerate(query[row]):
            torch.testing.assert_close(out[row, g], attend(q, keys[row], values[row], wanted, 6**-0.5))


def slow_quest(query, keys, page, count, grouped, newest, means=False):
    size, dim = keys.shape
    bounds = []
    for q in query:
        pages = [keys[m : m + page] for m in range(0, size, page)]
        least = [sum(max(float(q[d] * p[:, d].max()), float(q[d] * p[:, d].min())) for d in range(dim)) for p in pages]
        least = [float(q @ p.mean(0)) for p in pages] if means else least
        bounds.append([least[j // page] / math.sqrt(dim) for j in range(size)])
    last = newest_entries(size, page, count) if newest else ()
    if not grouped:
        return [by_weight(each, count, last) for each in bounds]
    shares = [softmax(each) for each in bounds]
    return [by_weight([sum(each) for each in zip(*shares, strict=True)], count, last)] * len(query)


@pytest.mark.parametrize("grouped", [False, True], ids=["per-head", "grouped"])
@pytest.mark.parametrize(
    "page, count, newest", [(1, 9, False), (4, 13, True), (5, 30, False), (47, 12, True), (24, 8, True)]
)
@pytest.mark.parametrize("means", [False, True], ids=["bounds", "means"])
def test_quest(step, page, count, newest, grouped, means):
    query, keys, values = step
    reader = Quest(budget=64, page=16, per_query_head=not grouped, newest=newest, means=means)
    choice, out = read(reader, query, keys, values, Setting(16, count, page))
    for row in range(2):
        wanted = slow_quest(query[row], keys[row], page, count, grouped, newest, means)
        for g, q in enumerate(query[row]):
            mine = choice.entries[row] if grouped else choice.entries[row, g]
            assert sorted(mine.tolist()) == wanted[g]
            torch.testing.assert_close(out[row, g], attend(q, keys[row], values[row], wanted[g], 6**-0.5))


def slow_sparq(query, keys, values, channels, count, grouped):
    size, dim = keys.shape
    found, shares = [], []
    for q in query:
        over = query if grouped else [q]
        largest = sorted(range(dim), key=lambda d: -sum(abs(float(each[d])) for each in over))[:channels]
        part = sum(abs(float(q[d])) for d in largest) / float(q.abs().sum())
        shares.append(softmax([float(sum(q[d] * k[d] for d in largest)) / math.sqrt(dim * part) for k in keys]))
    for g, q in enumerate(query):
        weights = [sum(each) for each in zip(*shares, strict=True)] if grouped else shares[g]
        entries = by_weight(weights, count)
        held = sum(shares[g][j] for j in entries)
        found.append((entries, held * attend(q, keys, values, entries, dim**-0.5) + (1 - held) * values.mean(0)))
    return found


@pytest.mark.parametrize("grouped", [False, True], ids=["per-head", "grouped"])
@pytest.mark.parametrize("channels, count", [(1, 5), (3, 20), (6, 46)])
def test_sparq(step, channels, count, grouped):
    query, keys, values = step
    reader = SparQ(budget=16, newest=False, per_query_head=not grouped)
    choice, out = read(reader, query, keys, values, Setting(16, count, 1, channels))
    for row in range(2):
        for g, (entries, wanted) in enumerate(slow_sparq(query[row], keys[row], values[row], channels, count, grouped)):
            mine = choice.entries[row] if grouped else choice.entries[row, g]
            assert sorted(mine.tolist()) == entries
            torch.testing.assert_close(out[row, g], wanted)


@pytest.mark.parametrize("grouped", [False, True], ids=["per-head", "grouped"])
def test_exact_topk_holds_the_most_mass(step, grouped):
    query, keys, values = step
    choice, _ = read(ExactTopK(budget=16, per_group=grouped), query, keys, values, Setting(16, 12))
    weights = (query @ keys.transpose(1, 2) * 6**-0.5).softmax(-1)
    held = weights.sum(1) if grouped else weights
    mine = held.gather(-1, choice.entries).sum(-1)
    torch.testing.assert_close(mine, held.topk(12, dim=-1).values.sum(-1))
    assert choice.entries.tolist() == choice.entries.sort(-1).values.tolist()


@pytest.mark.parametrize(
    "reader",
    [HSA(budget=16), Quest(budget=16), SparQ(budget=16), ExactTopK(budget=16), Quest(budget=16, per_query_head=True)],
    ids=lambda reader: type(reader).__name__,
)
def test_reading_everything_is_dense(step, reader):
    query, keys, values = step
    dense = (query @ keys.transpose(1, 2) * 6**-0.5).softmax(-1) @ values
    for page in (1, 3):
        _, out = read(reader, query, keys, values, Setting(16, 47, page, 6))
        torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("reader", [HSA(budget=16), SparQ(budget=16)], ids=["hsa", "sparq"])
def test_a_query_head_without_anything_in_the_groups_channel(reader):
    query, keys, values = (torch.randn(1, size, 6) for size in (2, 40, 40))
    query[0, 0], query[0, 1, 2] = torch.tensor([0.1, 0.1, 9.0, 0.1, 0.1, 0.1]), 0.0
    _, out = read(reader, query, keys, values, Setting(16, 5, 1, 1))
    assert bool(out.isfinite().all())
    _, out = read(reader, torch.zeros_like(query), keys, values, Setting(16, 5, 1, 1))
    assert bool(out.isfinite().all())


def test_golden_hsa():
    keys, values = (factor * golden([1, 2, 24, 4], seed)[0] for factor, seed in ((3, 2), (1, 3)))
    query = 3 * golden([1, 2, 2, 4], 7)[0]
    choice, out = read(HSA(budget=16, newest=False), query, keys, values, Setting(16, 6, 3, 2))
    assert choice.entries.sort(-1).values.tolist() == [[12, 13, 14, 21, 22, 23], [12, 13, 14, 15, 16, 17]]
    wanted = torch.tensor([[-0.72296, 0.511078, -0.252684, 0.983214], [-0.134226, -0.897598, 0.337164, -0.426022]])
    torch.testing.assert_close(torch.stack([out[0, 0], out[1, 1]]), wanted.double(), atol=1e-5, rtol=0)
    _, dense = read(HSA(budget=16), query, keys, values, Setting(16, 24, 1, 4))
    wanted = torch.tensor([-0.90355, 0.331315, -0.432529, 0.802336]).double()
    torch.testing.assert_close(dense[0, 0], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "total, tokens, new, cap, prompt, page, channels, count",
    [
        (131072, 256, 128, 1296, 1168, 3, 75, 128),
        (131072, 512, 128, 3019, 2891, 3, 65, 256),
        (131072, 2048, 128, 12765, 12637, 3, 61, 1024),
        (32768, 512, 64, 3191, 3127, 3, 61, 256),
        (16384, 256, 128, 1595, 1467, 3, 61, 128),
        (4096, 1024, 64, 2628, 2564, 2, 99, 512),
        (2048, 1024, 64, 1710, 1646, 1, 76, 512),
        (1024, 1024, 64, 1024, 960, 1, 128, 512),
        (640, 1024, 64, 640, 576, 1, 128, 512),
    ],
)
def test_golden_parameters(total, tokens, new, cap, prompt, page, channels, count):
    assert stored_entries(total - new, new, tokens) == cap
    assert RocketEviction(budget=tokens).entries(total - new, new) == prompt
    facts = ReadFacts(0, 30, total - new, new, 128)
    setting = HSA(budget=tokens, after_eviction=True).setting(facts)
    assert setting == Setting(tokens, count, page, channels)


@pytest.mark.parametrize("ratio, page, channels", [(512, 23, 5), (128, 12, 12), (64, 8, 16), (16, 4, 32), (4, 2, 64)])
def test_hsa_alone_spends_half_on_estimates(ratio, page, channels):
    setting = hsa_setting(256 * ratio, 256, 128)
    assert (setting.page, setting.channels, setting.count) == (page, channels, 128)


LENGTHS = (300, 513, 700, 1024, 2049, 5000, 8192, 20000, 32768, 70001, 131072)
PAGED = {"quest": Quest, "hsa": HSA, "hsa after": lambda **given: HSA(after_eviction=True, **given)}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("budget", [16, 64, 256, 512, 4096, "5%"])
@pytest.mark.parametrize("name", PAGED)
def test_at_any_length_the_newest_is_read_and_the_query_has_its_say(name, budget, dim):
    """What a step reads, estimates included, is the budget; the current token is part of it; half follows the query."""
    reader = PAGED[name](budget=budget)
    for length in LENGTHS:
        setting = reader.setting(ReadFacts(0, 30, length - 40, 40, dim))
        stored = length if name != "hsa after" else stored_entries(length - 40, 40, setting.tokens)
        if reader.reads_all(setting, stored):
            continue
        page, count = setting.page, setting.count
        # Of pages the greatest and the least value of every channel, or one of them in few.
        metadata_bytes = 2 * dim if name == "quest" else setting.channels
        estimates = -(-stored // page) * metadata_bytes / (2 * dim)
        assert count + estimates <= setting.tokens + 1, (length, setting)
        # However full the newest page is, at the end of the prompt and all through the answer.
        for size in {stored - 40, stored - 39, stored - (stored - 1) % page, stored - 1, stored}:
            pages = -(-size // page)
            early = (torch.arange(pages) < pages // 2)[None]
            weights = torch.rand(1, pages)
            chosen = [
                set(best_entries(weights + half, size, page, count, True)[0].tolist()) for half in (early, ~early)
            ]
            assert all(len(each) == count and max(each) == size - 1 for each in chosen), (length, size, setting)
            assert len(chosen[0] & chosen[1]) <= count // 2, (length, size, setting)


def test_quest_at_131072_entries_and_its_own_budget_depends_on_the_query():
    """Pages of 512 and 256 entries to read: it read the first 256 of the newest page, whatever was asked."""
    keys, query = torch.randn(1, 131072, 8), torch.randn(1, 2, 8)
    reader = kvsieve.plan("quest").read
    setting = reader.setting(ReadFacts(0, 30, 131000, 72, 8))
    assert setting == Setting(512, 256, 512)
    chosen = [
        set(reader.choose(asking(q, 1.0), kv_rows_of(keys, keys), {}, setting).entries[0].tolist())
        for q in (query, -query)
    ]
    assert all(131071 in each and len(each) == 256 for each in chosen) and len(chosen[0] & chosen[1]) == 128


def test_settings_of_quest_and_sparq_split_the_budget():
    facts = ReadFacts(3, 30, 131000, 72, 128)
    assert Quest(budget=256).setting(facts) == Setting(256, 128, 1024)
    assert Quest(budget=256, page=16).setting(facts) == Setting(256, 256, 16)
    assert SparQ(budget=256).setting(facts) == Setting(256, 128, 1, 1)
    assert SparQ(budget=16384).setting(facts) == Setting(16384, 8192, 1, 16)
    assert HSA(budget="25%").setting(facts).tokens == 32768
    assert HSA(budget=256, skip_layers=(3, -1)).setting(facts) is None


def test_rocketkv_sums_the_group_before_it_pools():
    query, keys = 3 * golden([1, 4, 24, 4], 1), 3 * golden([1, 2, 24, 4], 2)
    chosen = RocketEviction(budget=16, window=4, kernel=3).select(context(query, keys), (10,))
    assert chosen.indices[0, :, :6].tolist() == [[8, 10, 11, 12, 18, 19], [7, 8, 9, 10, 11, 14]]
    assert chosen.indices[0, :, 6:].tolist() == [[20, 21, 22, 23]] * 2


def test_bad_parameters_are_refused():
    for make in (HSA, Quest, SparQ, ExactTopK, RocketEviction):
        with pytest.raises(PlanError, match="at least 16"):
            make(budget=15)
    with pytest.raises(PlanError, match="a page of 300 entries does not fit the budget of 256"):
        Quest(budget=256, page=300)
    with pytest.raises(PlanError, match="end of a prompt only"):
        PerTurn(base=SnapKV(budget=0.2, every=4))
    with pytest.raises(PlanError, match="takes a Reader"):
        kvsieve.Plan(read=SnapKV(budget=0.2))
    with pytest.raises(PlanError, match="not combined with read="):
        kvsieve.Plan(propagate=kvsieve.plan("gemfilter").propagate, read=HSA(budget=64))
    with pytest.raises(PlanError, match="cannot be combined"):
        kvsieve.Plan(propagate=kvsieve.plan("gemfilter").propagate, evict=PerTurn(base=SnapKV(budget=0.2)))
    with pytest.raises(PlanError, match="base"):
        kvsieve.plan("perturn", base="lagkv")
