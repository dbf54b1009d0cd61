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
from kvsieve.errors import CacheStateError, PlanError, UnsupportedOptionError
from kvsieve.hf.cache.batching import can_stack, stack
from kvsieve.hf.reuse import unserved
from kvsieve.methods import InfLLM
from kvsieve.methods.infllm import BlockSetting
from kvsieve.shared.prompt import next_logits
from tiny import padded_prompt, tiny_model, tiny_prompt

HEADS, GROUPS = 2, 3


def naive(query, keys, window, real=None, groups=GROUPS):
    """Every entry's products with the next `window` real tokens of its row, of a whole prompt."""
    rows, size = keys.shape[0], keys.shape[2]
    found = torch.zeros(rows, query.shape[1], size, dtype=query.dtype)
    for row in range(rows):
        tokens = [at for at in range(size) if real is None or real[row, at]]
        for number, at in enumerate(tokens):
            for head in range(query.shape[1]):
                after = tokens[number + 1 : number + 1 + window]
                found[row, head, at] = sum(query[row, head, one] @ keys[row, head // groups, at] for one in after)
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
    # A share is at least its floor.
    assert setting(kvsieve.Budget(ratio=0.1, floor=512)) == (298, BlockSetting(1000, 1000, 72, sinks=125))
    assert InfLLM(budget="10%").window == 9


def test_what_makes_no_sense_is_refused():
    with pytest.raises(PlanError, match="leaves no blocks"):
        InfLLM(budget=64, local=64)
    with pytest.raises(PlanError, match="leaves no blocks"):
        InfLLM(budget="10%", local=200).setting(ReadFacts(0, 4, 1000, 0, 8))
    with pytest.raises(PlanError, match="sparse_questions"):
        InfLLM(budget=64, sparse_questions=True)
    with pytest.raises(PlanError, match="representatives must be"):
        InfLLM(budget=64, representatives=0)
    with pytest.raises(PlanError, match="does not keep; leave codec= out"):
        kvsieve.plan("infllm", budget=64, codec="int8")
    with pytest.raises(PlanError, match="leave evict= out"):
        kvsieve.Plan(read=InfLLM(budget=64), evict=kvsieve.plan("snapkv").evict)


SMALL = {"budget": 20, "sinks": 2, "local": 6, "block": 3, "representatives": 2}


@pytest.fixture(scope="module")
def model():
    return tiny_model(filled=True)


def answered(sieve, cache, ids, answer, mask=None):
    """Logits of an answer's tokens, given one by one."""
    parts = []
    for at in range(answer.shape[1]):
        ids = torch.cat([ids, answer[:, at : at + 1]], 1)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(ids[:, :1])], 1)
        parts.append(next_logits(sieve, cache, ids, mask))
    return torch.cat(parts, 1), ids, mask


@pytest.mark.parametrize("chunk", [None, 7])
def test_scores_of_prompts_answers_and_later_turns(model, monkeypatch, chunk):
    asked = {}
    observe = InfLLM.observe

    def noted(self, ctx):
        asked.setdefault(ctx.layer_idx, []).append(ctx.query)
        return observe(self, ctx)

    monkeypatch.setattr(InfLLM, "observe", noted)
    ids, mask = padded_prompt(40, 9)
    answer, more = tiny_prompt(2, 5, seed=1), tiny_prompt(2, 12, seed=2)
    later = torch.ones_like(more)
    later[0, :4] = 0
    with kvsieve.attach(model, kvsieve.plan("infllm", **SMALL)) as sieve, torch.no_grad():
        cache = sieve.prefill(ids, mask, chunk=chunk)
        _, ids, mask = answered(sieve, cache, ids, answer, mask)
        cache = sieve.prefill(torch.cat([ids, more], 1), torch.cat([mask, later], 1), cache=cache, chunk=chunk)
        for index, layer in cache.sieve_layers.items():
            store = layer.store
            real = store.valid[:, 0]
            assert not bool(real.all(1).any())
            query = torch.cat(asked[index], 2)
            ours = store.score_rows()[..., : store.size].reshape(2, query.shape[1], -1)
            groups = query.shape[1] // store.heads
            wanted = naive(query, store.keys, 6, real, groups)
            where = real[:, None].expand_as(ours)
            torch.testing.assert_close(ours[where], wanted[where])


def test_a_file_a_fork_and_a_batch_answer_as_without(model, tmp_path):
    ids, answer = tiny_prompt(2, 60, seed=3), tiny_prompt(2, 9, seed=4)
    with kvsieve.attach(model, kvsieve.plan("infllm", **SMALL)) as sieve, torch.no_grad():
        alone = [answered(sieve, sieve.prefill(ids[row, None]), ids[row, None], answer[row, None])[0] for row in (0, 1)]
        caches = [sieve.prefill(ids[row, None]) for row in (0, 1)]
        sieve.save(caches[0], tmp_path / "saved")
        for held in (sieve.load(tmp_path / "saved").cache, caches[0].fork()):
            torch.testing.assert_close(answered(sieve, held, ids[:1], answer[:1])[0], alone[0])
        assert can_stack(caches)
        found, _, _ = answered(sieve, stack(caches), ids, answer)
        torch.testing.assert_close(found, torch.cat(alone))


def test_two_prompts_are_one(model):
    ids, answer = tiny_prompt(1, 60, seed=3), tiny_prompt(1, 6, seed=4)
    with kvsieve.attach(model, kvsieve.plan("infllm", **SMALL)) as sieve, torch.no_grad():
        wanted, _, _ = answered(sieve, sieve.prefill(ids), ids, answer)
        cache = sieve.prefill(ids, cache=sieve.prefill(ids[:, :33]))
        torch.testing.assert_close(answered(sieve, cache, ids, answer)[0], wanted)


def test_what_has_not_observed_is_refused(model):
    ids = tiny_prompt(1, 60, seed=3)
    plan = kvsieve.plan("infllm", **SMALL)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        own = sieve.prefill(ids)
        with pytest.raises(UnsupportedOptionError, match="scored entries by the queries after them"):
            sieve.edit(own, ids)
        answered(sieve, own, ids, ids[:, :2])
        with pytest.raises(UnsupportedOptionError, match="has scored entries by their queries"):
            own.crop(-1)
        with pytest.raises(CacheStateError, match="did not observe that"):
            answered(sieve, sieve.adopt(cache), ids, ids[:, :1])
    # Passes of another plan have not added to the scores.
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        sieve.adopt(own)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        with pytest.raises(CacheStateError, match="62 entries were stored under another plan"):
            sieve.prefill(torch.cat([ids, ids[:, :9]], 1), cache=sieve.adopt(own))
        assert "scores entries" in unserved(sieve, {})
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, pytest.raises(PlanError, match="scores entries by"):
        sieve.generate(ids, max_new_tokens=2, draft="self:infllm:budget=20")
