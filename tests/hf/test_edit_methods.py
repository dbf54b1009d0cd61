"""Edits under methods: an edit that is undone, or prefilled in full, changes nothing in later turns."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from small import plan_of, stored
from tiny import greedy, tiny_prompt

METHODS = (
    *("adakv", "defensivekv", "kivi", "kvsquared", "quest", "random", "simlayerkv", "snapkv"),
    *("threshold", "uncomp", "windowkv"),
)
NEW = torch.tensor([3, 4, 5])


def turn(sieve, cache, ids, size, seed):
    more = torch.cat([ids, tiny_prompt(1, size, seed=seed)], 1)
    return sieve.generate(more, cache=cache, **greedy(max_new_tokens=6)).sequences


def kept(cache, name):
    # Encoded entries are in the order in which they were encoded.
    heads = [head for layer in stored(cache)[0] for head in layer]
    return [sorted(head) for head in heads] if name == "kivi" else heads


@pytest.mark.parametrize("name", METHODS)
def test_there_and_back_leaves_later_turns_as_they_were(model, name):
    ids, found = tiny_prompt(1, 60), []
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        for edited in (False, True):
            first = sieve.generate(ids, **greedy(max_new_tokens=5))
            cache = first.cache
            if edited:
                edit = sieve.edit(cache, first.sequences[:, :-1], window=0)
                edit.move((10, 20), 40)
                edit.insert(20, NEW)
                edit.cut((20, 23))
                assert torch.equal(edit.move((30, 40), 10).ids, first.sequences[:, :-1])
            second = turn(sieve, cache, first.sequences, 12, seed=1)
            found.append((turn(sieve, cache, second, 30, seed=2).tolist(), kept(cache, name)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", METHODS)
def test_an_edit_in_full_before_anything_is_dropped_is_a_new_prefill(model, name):
    ids = tiny_prompt(1, 40)
    with kvsieve.attach(model, plan_of(name, model, budget=60, every=3)) as sieve:
        cache = sieve.prefill(ids)
        done = sieve.edit(cache, ids, window="all").replace((8, 15), NEW)
        anew = sieve.prefill(done.ids)
        answers = [turn(sieve, each, done.ids, 50, seed=1).tolist() for each in (cache, anew)]
        assert answers[0] == answers[1] and kept(cache, name) == kept(anew, name)
