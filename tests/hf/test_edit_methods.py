"""Edits under methods: an edit that is undone, or prefilled in full, changes nothing in later turns.

And a method goes on acting after an edit or a join, where tokens of an answer follow without a prompt.
"""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import UnsupportedOptionError
from small import ACTING, plan_of, stored
from tiny import greedy, tiny_prompt

METHODS = (
    *("adakv", "defensivekv", "kivi", "kvsquared", "quest", "random", "simlayerkv", "snapkv"),
    *("threshold", "uncomp", "windowkv"),
)
NEW = torch.tensor([3, 4, 5])
# Methods that choose what an answer attends to at the end of its prompt.
VIEWS = ("perturn", "rocketkv-mt")


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


def rearranged(sieve, how, ids, path):
    """A conversation and its cache, with entries in other columns than those they were prefilled in."""
    if how == "join":
        joined = sieve.join([ids[:, :30], ids[:, 30:]], kind="modules")
        return joined.ids, joined.cache
    first = sieve.generate(ids, **greedy(max_new_tokens=5))
    done = sieve.edit(first.cache, first.sequences[:, :-1], window=4).cut((10, 20))
    if how == "edit":
        return done.ids, first.cache
    sieve.save(first.cache, path, ids=done.ids)
    return done.ids, sieve.load(path).cache


def answered(sieve, cache, tokens):
    """Feed an answer token by token, and return what each layer stores, and attends to."""
    for token in tokens:
        sieve.feed(cache, token[None, None], None)
    views = [layer.view for layer in cache.sieve_layers.values()]
    return stored(cache), [None if view is None else (view.slots.tolist(), view.end) for view in views]


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("how", ["edit", "edit, saved", "join"])
@pytest.mark.parametrize("name", (*ACTING, *VIEWS))
def test_a_token_after_it_begins_a_turn(model, name, how, tmp_path):
    """As a prompt of one token does, so that the method's records are those of the entries as they are."""
    new = tiny_prompt(1, 9, seed=3)[0]
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        try:
            ids, cache = rearranged(sieve, how, tiny_prompt(1, 60), tmp_path / "cache")
        except UnsupportedOptionError as refused:
            assert "cannot be" in str(refused)
            return
        if cache.conversation.half_read:
            pytest.skip("the question follows")
        other = cache.fork()
        sieve.prefill(torch.cat([ids, new[None, :1]], 1), cache=other)
        assert answered(sieve, cache, new) == answered(sieve, other, new[1:])
        assert name not in VIEWS or all(layer.view is not None for layer in cache.sieve_layers.values())


def test_a_method_without_records_goes_on_with_the_answer(model):
    with kvsieve.attach(model, plan_of("snapkv", model)) as sieve:
        ids, cache = rearranged(sieve, "edit", tiny_prompt(1, 60), None)
        before = cache.entries()
        sieve.feed(cache, ids[:, :1], None)
        assert cache.entries() == [entries + 1 for entries in before] and not cache.turn.reading
