"""What a budget means over turns, for every method, and that a padded row of a batch goes the way it would alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kvsieve
from small import plan_of, stored
from tiny import greedy

ANSWER = 4
GREEDY = greedy()
# More than a first turn of 10, and enough for the least that every method keeps.
NUMBER, TURNS = 60, (10, 240, 10, 60)

CODECS = [name for name in kvsieve.list_methods() if kvsieve.method_info(name).is_codec]
SPARSE_PROMPTS = [name for name in kvsieve.list_methods() if kvsieve.method_info(name).is_prefill]

# Methods whose entries once a prompt is complete are not the budget's, and why; docs/options.md lists the same.
KEEPS_ALL = {
    **dict.fromkeys(
        ("clusterkv", "exacttopk", "hsa", "infllm", "kascade", "loki", "omnikv", "quest", "sparq"),
        "the budget is what a token reads",
    ),
    **dict.fromkeys(("perturn", "rocketkv-mt"), "the budget is what an answer reads"),
    **dict.fromkeys((*CODECS, *SPARSE_PROMPTS), "has no budget"),
    "full": "has no budget",
    "mixed": "the budget is what stays exact",
}
OWN_NUMBER = {"rocketkv": "the budget is what a token reads, and what is stored follows from it"}
FEWER = {
    **dict.fromkeys(
        ("asl", "claa", "fastkv", "pyramidinfer", "staged"), "deep layers hold what came to them, where that is less"
    ),
    "specprefill": "layers hold what is read, where that is less",
}
GROWS = {
    "duoattention": "retrieval heads keep all that is generated, until the next prompt",
    "fastgen": "heads keep special tokens and punctuation in addition, or all that is generated",
}
BY_ATTENTION = {
    "fastgen": "the budget is what two of a head's policies keep",
    "simlayerkv": "the budget is what lazy layers keep",
}
# A share too, where it says what stays.
BUDGETS = [(name, NUMBER) for name in kvsieve.list_methods()]
BUDGETS += [(name, "20%") for name in kvsieve.list_methods() if name not in KEEPS_ALL]


@dataclass
class Turn:
    """Of each layer, entries per KV head on average: before a turn, once its prompt was complete, and at its end.

    length: true tokens of the conversation then; fed: new ones among them.
    """

    length: int
    fed: int
    before: list[float]
    prompt: list[float]
    end: list[float]


def talk(model, plan, turns, answer=ANSWER):
    make, ids, out = torch.Generator().manual_seed(1), torch.zeros(1, 0, dtype=torch.int64), []
    with kvsieve.attach(model, plan) as sieve:
        cache, seen = sieve.new_cache(), []

        def note(module, args, output):
            seen.append([sum(map(len, heads)) / len(heads) for heads in stored(cache)[0]])

        for turn in turns:
            known, before = (
                cache.conversation.caller_length_and_mask()[0],
                seen[-1] if seen else [0.0] * len(cache.sieve_layers),
            )
            ids = torch.cat([ids, torch.randint(2, 120, (1, turn), generator=make)], 1)
            handle = model.register_forward_hook(note)
            result = sieve.generate(
                ids, torch.ones_like(ids), cache=cache, max_new_tokens=answer, min_new_tokens=answer, **GREEDY
            )
            handle.remove()
            out.append(Turn(ids.shape[1], ids.shape[1] - known, before, seen[-answer], seen[-1]))
            ids = result.sequences
    return out


def mean(layers):
    return sum(layers) / len(layers)


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize(("name", "budget"), BUDGETS)
def test_a_budget_holds_once_every_turns_prompt_is_complete(model, name, budget):
    plan = plan_of(name, model, budget=budget)
    for turn in talk(model, plan, TURNS):
        there = [entries + turn.fed for entries in turn.before]
        if name in KEEPS_ALL:
            assert turn.prompt == there == [turn.length] * 4
            continue
        if name in BY_ATTENTION:
            assert mean(turn.prompt) <= mean(there), turn
            continue
        asked = NUMBER if budget == NUMBER else int(0.2 * turn.length)
        if plan.evict is not None:
            asked = max(asked, plan.evict.minimum)
        if name in OWN_NUMBER:
            asked = plan.evict.entries(turn.length, ANSWER)
        # A prompt that is read twice is read anew in every turn, all of the conversation.
        wanted = min(asked, turn.length if plan.shortens_prompt else mean(there))
        assert mean(turn.prompt) <= wanted + 1, turn
        if name not in FEWER:
            assert mean(turn.prompt) >= wanted - 1, turn


def acting_while_decoding(name):
    """A method's parameters with which it acts while decoding too; None where none makes it."""
    info = kvsieve.method_info(name)
    if name in ("lookahead", "mixed"):
        return None
    return {"every": 3} if "every" in info.parameters else {} if name == "lagkv" else None


DECODING = {name: given for name in kvsieve.list_methods() if (given := acting_while_decoding(name)) is not None}


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize("name", DECODING)
def test_memory_stays_bounded_while_decoding_after_prompts_that_fit_too(model, name):
    plan = plan_of(name, model, budget=40, **DECODING[name])
    slack = 8 if name == "lagkv" else 2  # Tokens that come between two times it acts: a partition, or every - 1.
    for turn in talk(model, plan, (10, 8), answer=56):
        if name in GROWS:
            assert any(entries < turn.length + 55 for entries in turn.end), "heads that stream roll"
            continue
        asked = plan.evict.entries(turn.length, 56) if name in OWN_NUMBER else 40
        assert asked - 1 <= mean(turn.end) <= asked + slack, turn


# Tokens that two rows bring to each turn, and those of their answers. Either row is padded in some turns. Some of these
# are shorter than a window, and evictors act on them while decoding, before the answer has filled it.
ROWS = (36, 31, 4), (40, 2, 4), (2, 12, 4), (12, 1, 4)

# Small enough that rows encode several blocks, at different times.
ENCODING = {name: {"block": 16, "tail": 8} for name in CODECS}
PLANS = {
    **{name: {**DECODING.get(name, {}), **ENCODING.get(name, {})} for name in kvsieve.list_methods()},
    "snapkv, every token": {"every": 1, "window": 8},
    "keydiff, chunks": {"chunks": True},
    "lagkv, chunks": {"chunks": True, "budget": "40%"},
    "snapkv, codec": {"codec": "kivi:bits=8:block=8:tail=4"},
}
# One of each kind in chunks as well: at the end, while decoding, on every chunk, ragged, shortened, read, viewed.
CHUNKED = (
    "snapkv",
    "snapkv, every token",
    "keydiff, chunks",
    "lagkv, chunks",
    "snapkv, codec",
    *("h2o", "adakv", "kvzip", "fastkv", "asl", "gemfilter", "rocketkv", "hsa", "perturn"),
)
PADDED = [*((name, None) for name in PLANS), *((name, 16) for name in CHUNKED)]


def tokens_held(cache, mask, row):
    """Per layer and head: the numbers of a row's true tokens that are stored."""
    numbers = (mask[row].cumsum(-1) - 1).tolist()
    return [[[numbers[column] for column in head] for head in layer] for layer in stored(cache, [0] * len(mask))[row]]


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize(("name", "chunk"), PADDED)
def test_a_padded_row_goes_the_way_it_would_alone(model, name, chunk):
    """Over chunks, turns and decoding: the same tokens are stored, and logits are the same.

    A turn's padding stands between the last token of the row's answer, which was not fed yet, and its new tokens; in
    front of both where an evictor acts on every chunk, which hidden tokens between others would move.
    """
    plan = plan_of(name.partition(",")[0], model, **{"budget": 40, **PLANS[name]})
    make = torch.Generator().manual_seed(2)
    ids, mask = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)
    with kvsieve.attach(model, plan) as sieve:
        cache, own = sieve.new_cache(), [sieve.new_cache(), sieve.new_cache()]
        for *lengths, answer in ROWS:
            behind = 0 if chunk and "chunks" in name else min(ids.shape[1], 1)
            real = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
            new = torch.randint(2, 120, real.shape, generator=make) * real
            at = ids.shape[1] - (ids.shape[1] > 0) + behind
            ids = torch.cat([ids[:, :at], new, ids[:, at:]], 1)
            mask = torch.cat([mask[:, :at], real.long(), mask[:, at:]], 1)
            options = {"chunk": chunk, "max_new_tokens": answer, "min_new_tokens": answer, **GREEDY}
            options |= {"output_logits": True, "return_dict_in_generate": True}
            both, alone = sieve.generate(ids, mask, cache=cache, **options), []
            for row, bare in enumerate(own):
                bare_ids = ids[row : row + 1, mask[row].bool()]
                alone.append(sieve.generate(bare_ids, torch.ones_like(bare_ids), cache=bare, **options))
            ids, mask = both.sequences, torch.cat([mask, torch.ones(2, answer, dtype=torch.int64)], 1)
            fed = mask[:, :-1]
            for row, bare in enumerate(own):
                mine = tokens_held(bare, torch.ones(1, int(fed[row].sum()), dtype=torch.int64), 0)
                assert tokens_held(cache, fed, row) == mine
                found, wanted = torch.stack(both.output.logits, 1)[row], torch.stack(alone[row].output.logits, 1)[0]
                # What is encoded is read in float32, and a rounding error may give an entry its neighbour's code.
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2 if plan.codec or plan.rest else 1e-5)


@pytest.mark.parametrize("name", ["perturn", "rocketkv-mt"])
def test_what_drops_nothing_grows_as_full_kv_does(model, name):
    """A conversation's views and page tables are those of its last turn: turns leave nothing but their KV."""
    sizes = {}
    for each in ("full", name):
        ids, sizes[each] = torch.arange(3, 103)[None], []
        with kvsieve.attach(model, kvsieve.plan(each, **({} if each == "full" else {"budget": 40}))) as sieve:
            cache = sieve.new_cache()
            for turn in range(1, 31):
                answer = sieve.generate(ids, torch.ones_like(ids), cache=cache, max_new_tokens=2, **GREEDY)
                ids = torch.cat([answer.sequences, torch.arange(3, 13)[None]], 1)
                if turn % 15 == 0:
                    sizes[each].append(cache.nbytes())
    more = [mine - full for mine, full in zip(sizes[name], sizes["full"], strict=True)]
    assert more[0] > 0 and more[1] - more[0] < 0.1 * (sizes["full"][1] - sizes["full"][0])
