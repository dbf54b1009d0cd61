"""What a cache knows of its conversation after an edit: rules, turns, rows that ended."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import CacheStateError, InputError
from tiny import greedy, tiny_prompt

PLANS = {"full": {}, "snapkv": {"budget": 40, "window": 8, "floor": 0}}


@pytest.fixture
def ids():
    return tiny_prompt(1, 60)


@pytest.mark.parametrize("again", ["prefilled", "removed"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_conversation_is_exact_again_without_approximate_entries(model, ids, plan, again):
    with kvsieve.attach(model, kvsieve.plan(plan, **PLANS[plan])) as sieve:
        cache = sieve.prefill(ids)
        sieve.edit(cache, ids, window=4).cut((20, 30))
        left = torch.cat([ids[:, :20], ids[:, 30:]], 1)
        assert cache.conversation.approximate == ("edit:window=4",)
        editor = sieve.edit(cache, left, window="all")
        done = editor.cut((10, 20)) if again == "prefilled" else editor.cut((20, 50))
        rules = cache.conversation.approximate
        # Entries that a plan has evicted stay so.
        assert rules == (() if plan == "full" else ("edit:window=4", "edit:window=all"))
        more = torch.cat([done.ids, ids[:, :5]], 1)
        first = sieve.generate(more, cache=cache, **greedy(max_new_tokens=3))
        more = torch.cat([first.sequences, ids[:, :5]], 1)
        second = sieve.generate(more, cache=cache, **greedy(max_new_tokens=3))
        assert (second.stats.edited is None) == (plan == "full")


def test_an_approximate_part_before_an_exact_edit_stays_approximate(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        done = sieve.edit(cache, ids, window=0).cut((20, 30))
        sieve.edit(cache, done.ids, window="all").cut((40, 45))
        assert cache.conversation.approximate == ("edit:window=0",)


@pytest.mark.parametrize("to", [0, 60])
def test_turns_stay_in_order_after_a_move(model, ids, to):
    with kvsieve.attach(model, kvsieve.plan("snapkv", **PLANS["snapkv"])) as sieve:
        result = sieve.generate(ids, **greedy(max_new_tokens=7))
        cache = sieve.prefill(torch.cat([result.sequences, ids[:, :30]], 1), cache=result.cache)
        seen = torch.cat([result.sequences, ids[:, :30]], 1)
        sieve.edit(cache, seen, window=4).move((62, 90) if to == 0 else (5, 30), to)
        ends = [column for span in cache.conversation.acted for column in span]
        assert ends == sorted(ends)


def test_a_row_that_ended_before_others_is_refused(model):
    """Padding follows its answer, which a later turn hides by its columns."""
    ids = tiny_prompt(2, 40)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        plain = sieve.generate(ids, **greedy(max_new_tokens=8))
        end = int(plain.sequences[0, 42])
        result = sieve.generate(ids, **greedy(max_new_tokens=8, eos_token_id=end))
        cache = result.cache.fork()
        cache.batch_select_indices(torch.tensor([0]))
        with pytest.raises(InputError, match="1 rows with padding; prefill rows one by one"):
            sieve.edit(cache, result.sequences[:1, : cache.num_seen])


@pytest.mark.parametrize("window", [0, 8])
def test_an_editor_is_of_its_block(model, ids, window):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        editor = sieve.edit(cache, ids, window=window)
    with pytest.raises(CacheStateError, match="block that attached 'full' has ended"):
        editor.cut((10, 20))
    assert (cache.status, cache.num_seen) == ("ready", 60) and torch.equal(editor.ids, ids)
