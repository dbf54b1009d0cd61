"""What methods record while a prompt is read goes with its entries: copies, files, snapshots, tokens taken back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.request import PassRequest
from kvsieve.store import PrefixStore
from small import ACTING, plan_of, stored
from tiny import greedy, padded_prompt, tiny_prompt

PROMPT = tiny_prompt(1, 60)
CODEC = "kivi:bits=8:block=8:tail=4"
# By a method's name, parameters with which every part of it acts on as few tokens.
PLANS = {
    **{name: {} if name in ("lookahead", "mixed") else {"every": 3} for name in kvsieve.list_methods()},
    **{name: {"block": 16, "tail": 8} for name in kvsieve.list_methods() if kvsieve.method_info(name).is_codec},
    "asl": {"every": 3, "budget": 30},
    "clusterkv": {"per_cluster": 8, "chunk_length": 4},
    **{
        f"{name}, codec": {"every": 3, "codec": CODEC}
        for name in ("adakv", "cake", "fastkv", "h2o", "perturn", "quest", "snapkv")
    },
}


def forked(sieve, cache, path):
    other = cache.fork()
    feed(sieve, cache, tiny_prompt(1, 5, seed=8)[0])
    return other


def saved(sieve, cache, path):
    sieve.save(cache, path)
    return sieve.load(path).cache


def rolled_back(sieve, cache, path):
    snapshot = cache.snapshot()
    list(answered(sieve, cache, tiny_prompt(1, 5, seed=8)[0]))
    cache.rollback(snapshot)
    return cache


def taken_back(sieve, cache, path):
    tokens = tiny_prompt(1, 5, seed=8)
    sieve.feed(cache, tokens, None, PassRequest(tentative=True)).transaction.accept(0)
    return cache


def chosen(sieve, cache, path):
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def adopted(sieve, cache, path):
    return sieve.adopt(cache)


def refused(sieve, cache, path):
    """Nothing that a call is refused for is left behind."""
    with pytest.raises(kvsieve.KvsieveError):
        sieve.model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 3), **{CACHE: cache})
    return cache


ROUTES = (forked, saved, rolled_back, taken_back, chosen, adopted, refused)


def feed(sieve, cache, tokens):
    for token in tokens:
        sieve.feed(cache, token[None, None], None)


def begun(sieve):
    return sieve.generate(PROMPT, **greedy(max_new_tokens=5)).cache


def answered(sieve, cache, new):
    """Feed tokens of an answer, then a turn; yield logits, and what is stored, after each token and the turn."""
    for token in new:
        found = sieve.feed(cache, token[None, None], None, PassRequest(phase="decode"), logits=1)
        yield found.logits.tolist(), stored(cache)
    size = cache.conversation.caller_length_and_mask()[0]
    ids = torch.cat([PROMPT, tiny_prompt(1, size - 48, seed=4)], 1)
    options = greedy(max_new_tokens=4, output_logits=True, return_dict_in_generate=True)
    found = sieve.generate(ids, torch.ones_like(ids), cache=cache, **options)
    yield torch.stack(found.output.logits).tolist(), stored(cache)


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", PLANS)
def test_an_answer_goes_on_as_if_nothing_had_been(model, name, tmp_path):
    new = tiny_prompt(1, 7, seed=3)[0]
    with kvsieve.attach(model, plan_of(name.partition(",")[0], model, **PLANS[name])) as sieve:
        cache = begun(sieve)
        plain = list(answered(sieve, cache.fork(), new))
        for route in ROUTES:
            same = list(answered(sieve, route(sieve, cache.fork(), tmp_path / route.__name__), new)) == plain
            assert same, route.__name__


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", PLANS)
def test_a_fork_and_its_origin_go_on_in_turns_as_they_would_alone(model, name):
    news = tiny_prompt(2, 7, seed=3)
    with kvsieve.attach(model, plan_of(name.partition(",")[0], model, **PLANS[name])) as sieve:
        alone = [list(answered(sieve, begun(sieve), new)) for new in news]
        cache = begun(sieve)
        both = [answered(sieve, each, new) for each, new in zip((cache, cache.fork()), news, strict=True)]
        same = list(zip(*both, strict=True)) == list(zip(*alone, strict=True))
        assert same


# Methods that tell an answer's tokens from a prompt's.
APART = {
    "compactor": "tokens of an answer are not read in chunks",
    "rocketkv": "the budget follows from the prompt's length",
    "scope": "the prompt stays",
}


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ACTING)
def test_the_first_act_on_an_answer_to_a_prompt_that_stayed_whole_is_that_at_a_prompts_end(model, name):
    """Budgets are then divided, and records made, as if the prompt ended there."""
    ids, new = tiny_prompt(1, 60), tiny_prompt(1, 9, seed=3)[0]
    plan = dataclasses.replace(plan_of(name, model, every=3, budget=30), propagate=None)
    steps = plan.when.steps
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids[:, :-steps], reduce=False)
        whole = sieve.prefill(ids)
        feed(sieve, cache, ids[0, -steps:])
        assert stored(cache) == stored(whole) or name in APART
        feed(sieve, cache, new)
        feed(sieve, whole, new)
        assert stored(cache) == stored(whole) or name in APART
        assert plan.evict.keeps_prompt or max(cache.entries()) < cache.num_seen


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ["adakv", "cake", "dynamickv", "fastgen", "headkv", "pyramidkv", "sagekv", "zigzagkv"])
def test_a_row_that_stayed_whole_is_reduced_as_it_would_be_alone(model, name):
    """Though its prompt is shorter than the window, and the other row's is not."""
    (ids, mask), new = padded_prompt(30, 29), tiny_prompt(2, 8, seed=3)
    with kvsieve.attach(model, plan_of(name, model, every=3, budget=10)) as sieve:
        both = sieve.prefill(ids, mask, reduce=False)
        for column in new.T:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            sieve.feed(both, column[:, None], mask, PassRequest(phase="decode"))
        for row, padding in enumerate((0, 29)):
            alone = sieve.prefill(ids[row : row + 1, padding:], reduce=False)
            feed(sieve, alone, new[row])
            assert stored(both, (0, 29))[row] == stored(alone)[0]


def of_rows(cache):
    """Per row, layer and head: numbers of the true tokens that are stored, none for columns that a row has not kept."""
    mask = cache.conversation.mask
    places = torch.ones(cache.conversation.batch, cache.num_seen) if mask is None else mask
    numbers = (places.long().cumsum(1) - 1).tolist()
    rows = zip(numbers, stored(cache, (0,) * len(numbers)), strict=True)
    return [[[[own[at] for at in head] for head in layer] for layer in row] for own, row in rows]


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ACTING)
def test_rows_that_keep_different_numbers_of_drafts_have_the_records_of_each_alone(model, name):
    """Though one acts for the first time while another acts again, acts later, or has no token in a column."""
    ids, new = tiny_prompt(3, 30), tiny_prompt(3, 4, seed=3)
    plan = plan_of(name, model, every=3, budget=16)
    with kvsieve.attach(model, plan) as sieve:
        both = sieve.prefill(ids, reduce=False)
        alone = [sieve.prefill(ids[row : row + 1], reduce=False) for row in (0, 1, 2)]
        for counts in ((1, 2, 4), (4, 1, 2), (0, 2, 1), (4, 3, 0)):
            mask = both.conversation.mask
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 4), value=1)
            fed = sieve.feed(both, new, mask, PassRequest(phase="decode", tentative=True))
            if plan.weighs_layers:
                with pytest.raises(kvsieve.errors.UnsupportedOptionError, match="rows accept different numbers"):
                    fed.transaction.accept(counts)
                break
            fed.transaction.accept(counts)
            for row, cache in enumerate(alone):
                feed(sieve, cache, new[row, : counts[row]])
            assert of_rows(both) == [stored(cache)[0] for cache in alone], counts


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("before", ["h2o", "roco"])
@pytest.mark.parametrize("name", [name for name in ACTING if name not in ("h2o", "roco")])
def test_another_plan_does_not_go_on_from_them(model, name, before):
    with kvsieve.attach(model, plan_of(before, model, every=3)) as sieve:
        first = sieve.generate(tiny_prompt(1, 60), **greedy(max_new_tokens=5))
    plain = first.cache.fork()
    for layer in plain.sieve_layers.values():
        layer.state = {}
    new = tiny_prompt(1, 10, seed=3)
    more = torch.cat([first.sequences[:, : first.cache.num_seen], new], 1)
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        found = []
        for cache in (first.cache, plain):
            sieve.generate(more, cache=sieve.adopt(cache), **greedy(max_new_tokens=8))
            found.append(stored(cache))
        assert found[0] == found[1]
        feed(sieve, plain, new[0])


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", ACTING)
def test_the_next_turn_of_a_stored_conversation_is_that_of_its_cache(model, name, tmp_path):
    with kvsieve.attach(model, plan_of(name, model, every=3)) as sieve:
        first = sieve.generate(tiny_prompt(1, 60), **greedy(max_new_tokens=8))
        ids = first.sequences[0, : first.cache.num_seen].tolist()
        more = torch.tensor([[*ids, *tiny_prompt(1, 20, seed=3)[0].tolist()]])
        with PrefixStore(tmp_path) as store:
            store.add(sieve, ids, first.cache, 1.0)
        with PrefixStore(tmp_path) as store:
            found = store.find(sieve, more[0].tolist())
            assert found is not None and found.cache.num_seen == len(ids)
            caches = found.cache, first.cache
            answers = [sieve.generate(more, cache=cache, **greedy(max_new_tokens=9)).sequences for cache in caches]
        assert torch.equal(*answers) and stored(found.cache) == stored(first.cache)
