"""Evictors that choose by token ids get those of all tokens, however they were fed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.errors import CacheStateError, PlanError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.methods import KNorm
from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.roles import ChunkedEvictor
from kvsieve.shared.prompt import read_shared
from tiny import greedy, padded_prompt, tiny_model, tiny_prompt

SEEN = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(ScoredEvictor, needs=("tokens",), heads="own", query_aware=False):
    """Keeps tokens with large ids, and records the ids it gets."""

    def scores(self, ctx):
        if ctx.layer_idx == 0:
            SEEN.append(ctx.ids.clone())
        ids = ctx.ids[:, None].expand(-1, ctx.index.shape[1], -1)
        return ids.gather(2, ctx.index.long().clamp_min(0)).double()


PLAN = Plan(evict=Odd(budget="50%"), name="odd")


@pytest.fixture(autouse=True)
def forget():
    SEEN.clear()


def same(*wanted):
    assert len(SEEN) == len(wanted)
    assert all(torch.equal(found, ids) for found, ids in zip(SEEN, wanted, strict=True))


def largest(ids, count):
    order = sorted(range(len(ids)), key=lambda j: (-ids[j], j))
    return sorted(order[:count])


def test_prompts_in_one_piece_in_chunks_and_in_plain_calls():
    model = tiny_model()
    ids, mask = padded_prompt(40, 9)
    with kvsieve.attach(model, PLAN) as sieve:
        cache = sieve.prefill(ids, mask)
        sieve.prefill(ids, mask, chunk=7)
        model(input_ids=ids, attention_mask=mask)
        model.generate(ids, attention_mask=mask, max_new_tokens=2, **greedy())
    same(ids, ids, ids, ids)
    row = ids[1, 9:].tolist()
    assert (cache.layers[0].store.index[1, 0, -15:] - 9).tolist() == largest(row, 15)


def test_later_turns_questions_and_answers():
    ids = tiny_prompt(size=30)
    with kvsieve.attach(tiny_model(), PLAN) as sieve:
        first = sieve.generate(ids, max_new_tokens=5, **greedy())
        more = torch.cat([first.sequences, tiny_prompt(size=9, seed=3)], 1)
        sieve.prefill(more, cache=first.cache)
        sieve.generate(ids, question_tokens=6, max_new_tokens=2, **greedy())
    same(ids, more, ids[:, :24])


@pytest.mark.parametrize("reads", ["generate", "decode"])
def test_answers_that_are_evicted_from(reads):
    ids = tiny_prompt(size=30)
    plan = Plan(evict=Odd(budget=12, every=4), name="odd")
    model = tiny_model()
    with kvsieve.attach(model, plan) as sieve:
        if reads == "generate":
            whole = sieve.generate(ids, max_new_tokens=10, **greedy()).sequences
        else:
            whole = torch.cat([ids, tiny_prompt(size=10, seed=5)], 1)
            cache = sieve.new_cache()
            model(input_ids=ids, **{CACHE: cache})
            for at in range(30, 40):
                model(input_ids=whole[:, at : at + 1], **{CACHE: cache})
    same(ids, whole[:, :34], whole[:, :38])


def test_drafted_answers():
    ids = tiny_prompt(size=12).repeat(1, 3)
    plan = Plan(evict=Odd(budget=12, every=4), name="odd")
    ask = {"max_new_tokens": 14, **greedy()}
    with kvsieve.attach(tiny_model(), plan) as sieve:
        plain = sieve.generate(ids, **ask)
        alone = list(SEEN)
        SEEN.clear()
        drafted = sieve.generate(ids, draft="lookup", **ask)
    assert torch.equal(plain.sequences, drafted.sequences)
    # Tokens that were taken back may have been seen, too; those that stayed were seen as they are.
    assert all(any(torch.equal(ids, found) for found in SEEN) for ids in alone)


def test_forks_rows_snapshots_and_saved_caches(tmp_path):
    ids, mask = padded_prompt(30, 9)
    new = tiny_prompt(2, size=8, seed=4)
    with kvsieve.attach(tiny_model(), PLAN) as sieve:
        cache = sieve.prefill(ids, mask)
        snapshot = cache.snapshot()
        swapped = cache.fork()
        swapped.batch_select_indices(torch.tensor([1, 0]))
        sieve.save(cache, tmp_path / "odd.kv")
        loaded = sieve.load(tmp_path / "odd.kv").cache
        SEEN.clear()
        whole = torch.cat([ids, new], 1)
        wide = torch.cat([mask, torch.ones_like(new)], 1)
        sieve.prefill(whole, wide, cache=loaded)
        sieve.prefill(whole.flip(0), wide.flip(0), cache=swapped)
        sieve.prefill(whole, wide, cache=cache)
        cache.rollback(snapshot)
        sieve.prefill(whole, wide, cache=cache)
    same(whole, whole.flip(0), whole, whole)


@pytest.mark.parametrize("window", [0, 4])
def test_edited_conversations(window):
    ids = tiny_prompt(size=30)
    more = tiny_prompt(size=6, seed=4)
    with kvsieve.attach(tiny_model(), PLAN) as sieve:
        cache = sieve.prefill(ids)
        cut = sieve.edit(cache, ids, window=window).cut((10, 15)).ids
        sieve.prefill(torch.cat([cut, more], 1), cache=cache)
        SEEN.clear()
        tiny_model()(input_ids=more, **{CACHE: cache})
    same(torch.cat([ids[:, :10], ids[:, 15:], more, more], 1))


def test_a_reading_shared_by_evictors():
    ids = tiny_prompt(size=30)
    model = tiny_model()
    shared = read_shared(model, None, ids, window=1, evictors=[PLAN.evict, KNorm(budget="50%")])
    kept = shared.reduced(PLAN.evict).layers[0].store.index[0, 0].tolist()
    assert kept == largest(ids[0].tolist(), 15)
    same(ids)


def test_caches_as_rows_of_one():
    from kvsieve.hf.cache.batching import stack

    ids = tiny_prompt(2, size=30)
    new = tiny_prompt(2, size=6, seed=4)
    with kvsieve.attach(tiny_model(), PLAN) as sieve:
        rows = [sieve.prefill(ids[:1]), sieve.prefill(ids[1:])]
        SEEN.clear()
        sieve.prefill(torch.cat([ids, new], 1), cache=stack(rows))
    same(torch.cat([ids, new], 1))


def test_other_plans_keep_no_ids():
    ids = tiny_prompt(size=30)
    with kvsieve.attach(tiny_model(), kvsieve.plan("knorm", budget=12)) as sieve:
        assert sieve.generate(ids, max_new_tokens=3, **greedy()).cache.conversation.ids is None


def test_embeddings_and_unknown_tokens_are_refused():
    model = tiny_model()
    ids = tiny_prompt(size=30)
    wanted = "'odd' chooses by token ids.*give input_ids"
    with kvsieve.attach(model, PLAN), pytest.raises(UnsupportedOptionError, match=wanted):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
    with kvsieve.attach(model, PLAN) as sieve, pytest.raises(CacheStateError, match="does not know those of its 30"):
        model(input_ids=ids[:, :5], **{CACHE: sieve.adopt(cache)})


def test_chunk_wise_compression_has_no_ids():
    @dataclasses.dataclass(frozen=True)
    class Chunked(ChunkedEvictor, needs=("tokens",)):
        budget: kvsieve.planning.budget.Budget = kvsieve.planning.budget.Budget(tokens=9)
        question_tokens: int = 2
        chunk_length: int = 8

        def select(self, ctx, counts):
            return None

    with pytest.raises(PlanError, match='leave "tokens" out of its needs'):
        Plan(evict=Chunked())
