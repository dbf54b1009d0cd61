"""InfLLM: blocks represented by the keys that the queries after them attended to."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from attend import asking
from kvsieve.core import later_logits as later
from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.core.later_logits import later_logits
from kvsieve.core.representatives import BlockRepresentatives
from kvsieve.errors import CacheStateError, PlanError
from kvsieve.methods import InfLLM
from kvsieve.methods.infllm import BlockSetting

HEADS, GROUPS = 2, 3


def naive(query, keys, window, real=None):
    """Every entry's products with the next `window` real tokens of its row, of a whole prompt."""
    rows, size = keys.shape[0], keys.shape[2]
    found = torch.zeros(rows, query.shape[1], size, dtype=query.dtype)
    for row in range(rows):
        tokens = [at for at in range(size) if real is None or real[row, at]]
        for number, at in enumerate(tokens):
            for head in range(query.shape[1]):
                after = tokens[number + 1 : number + 1 + window]
                found[row, head, at] = sum(query[row, head, one] @ keys[row, head // GROUPS, at] for one in after)
    return found


def drawn(rows, size):
    torch.manual_seed(size)
    query = torch.randn(rows, HEADS * GROUPS, size, 4, dtype=torch.float64)
    return query, torch.randn(rows, HEADS, size, 4, dtype=torch.float64)


@pytest.mark.parametrize("ends", [(23,), (5, 6, 7, 20, 23), tuple(range(1, 24))])
@pytest.mark.parametrize("block", [4, 1024])
def test_scores_are_products_with_the_next_queries_however_a_prompt_is_cut(monkeypatch, ends, block):
    monkeypatch.setattr(later, "_BLOCK", block)
    query, keys = drawn(1, 23)
    total = torch.zeros(1, HEADS * GROUPS, 23, dtype=torch.float64)
    start = 0
    for end in ends:
        sums, before = later_logits(query[:, :, start:end], keys[:, :, :end], torch.arange(end)[None], None, 5)
        total[:, :, before:end] += sums
        start = end
    torch.testing.assert_close(total, naive(query, keys, 5))


@pytest.mark.parametrize("block", [2, 1024])
def test_padding_neither_asks_nor_counts(monkeypatch, block):
    monkeypatch.setattr(later, "_BLOCK", block)
    query, keys = drawn(2, 12)
    real = torch.ones(2, 12, dtype=torch.bool)
    # A prompt's padding, and a later turn's.
    real[1, :3] = real[1, 6:9] = False
    positions = (real.cumsum(1) - 1).clamp_min(0)
    query[~real[:, None].expand(-1, 6, -1)] = float("nan")
    total = torch.zeros(2, HEADS * GROUPS, 12, dtype=torch.float64)
    for start, end in ((0, 6), (6, 12)):
        passed = query[:, :, start:end], keys[:, :, :end], positions[:, :end], real[:, :end]
        sums, before = later_logits(*passed, 4)
        total[:, :, before:end] += sums
    wanted = naive(query, keys, 4, real)
    where = real[:, None].expand_as(total)
    torch.testing.assert_close(total[where], wanted[where])


def rows_of(keys, scores=None):
    """KV rows of [X, N, D], two heads per batch row."""
    count, size = keys.shape[:2]
    flat = keys.flatten(0, 1)
    return KVRows(flat, flat, None, torch.arange(count) * size, 1, size, heads=2, scores=scores)


def test_representatives_by_hand():
    keys = torch.arange(12.0).view(1, 12, 1)
    scores = torch.tensor([[[9.0, 9, 1, 5, 3, 4, 8, 7, 2, 0, 0, 0], [9, 9, 3, 2, 1, 0, 0, 1, 0, 0, 0, 0]]])
    kv_rows = rows_of(keys, scores)
    table = BlockRepresentatives(2, 3, 2, 3)
    table.update(kv_rows)
    # Entries 2-4 and 5-7: 8-10 are the window, with the newest. The first query head: 3 and 4, 6 and 7.
    assert table.size == 8
    assert table.keys[0, :, :, 0].tolist() == [[3.5, 6.5], [2.5, 6.0]]
    table.keep_first(9)
    assert table.size == 5 and table.keys.shape == (1, 2, 1, 1)
    table.update(kv_rows)
    assert table.size == 8 and table.keys[0, 1, 1, 0] == 6.0
    with pytest.raises(CacheStateError, match="did not observe"):
        BlockRepresentatives(2, 3, 2, 3).update(rows_of(keys))


def test_all_heads_read_the_blocks_with_the_largest_sums():
    torch.manual_seed(0)
    keys, query = torch.randn(4, 40, 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    scores = torch.randn(4, 3, 40, dtype=torch.float64)
    reader = InfLLM(budget=24, sinks=2, local=8, block=4, representatives=2)
    setting = BlockSetting(24, 24, 4, sinks=2)
    found = reader.choose(asking(query, 0.5), rows_of(keys, scores), {}, setting).entries
    assert found.shape == (4, 24)
    # 29 entries without the sinks, the window and the newest: seven blocks, and entry 30 before the window.
    for row in range(2):
        sums = []
        for block in range(7):
            first = 2 + 4 * block
            total = 0
            for head in (2 * row, 2 * row + 1):
                for group in range(3):
                    best = sorted(range(first, first + 4), key=lambda at: -scores[head, group, at])[:2]
                    total += sum(float(query[head, group] @ keys[head, at]) for at in best)
            sums.append(total)
        order = sorted(range(7), key=lambda block: -sums[block])
        # 24 - 2 - 10 entries are three blocks.
        wanted = {0, 1, *range(30, 40), *(2 + 4 * block + at for block in order[:3] for at in range(4))}
        for head in (2 * row, 2 * row + 1):
            assert set(found[head].tolist()) == wanted


@pytest.mark.parametrize("stored", [25, 26, 27, 28, 29, 41])
def test_as_many_entries_are_read_wherever_a_block_ends(stored):
    torch.manual_seed(1)
    keys, query = torch.randn(2, stored, 5), torch.randn(2, 3, 5)
    reader = InfLLM(budget=24, sinks=2, local=8, block=4)
    setting = reader.setting(ReadFacts(0, 4, stored, 0, 5))
    found = reader.choose(asking(query, 0.5), rows_of(keys, torch.randn(2, 3, stored)), {}, setting).entries
    assert found.shape == (2, 24)
    assert all(len(set(entries)) == 24 and set(range(stored - 9, stored)) <= set(entries) for entries in found.tolist())


def test_the_paper_s_sizes_and_smaller_budgets():
    def setting(budget, **given):
        reader = InfLLM(budget=budget, **given)
        return reader.window, reader.setting(ReadFacts(0, 4, 10000, 0, 8))

    assert setting(6272) == (4096, BlockSetting(6272, 6272, 128, sinks=128))
    assert setting(1024) == (597, BlockSetting(1024, 1024, 38, sinks=128))
    assert setting(16) == (9, BlockSetting(16, 16, 1, sinks=2))
    assert setting("10%", local=600)[1].page == 35


def test_what_makes_no_sense_is_refused():
    with pytest.raises(PlanError, match="give local="):
        InfLLM(budget="10%")
    with pytest.raises(PlanError, match="leaves no blocks"):
        InfLLM(budget=64, local=64).setting(ReadFacts(0, 4, 1000, 0, 8))
    with pytest.raises(PlanError, match="sparse_questions"):
        InfLLM(budget=64, sparse_questions=True)
    with pytest.raises(PlanError, match="representatives must be"):
        InfLLM(budget=64, representatives=0)
    with pytest.raises(PlanError, match="does not keep; leave codec= out"):
        kvsieve.plan("infllm", budget=64, codec="int8")
    with pytest.raises(PlanError, match="leave evict= out"):
        kvsieve.Plan(read=InfLLM(budget=64), evict=kvsieve.plan("snapkv").evict)
