"""Whatever a store holds, an answer is the one given anew: nodes that would change it are not served."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve import methods as m
from kvsieve.hf import reuse
from kvsieve.hf.reuse import StoredPrefixes
from kvsieve.store import PrefixStore
from kvsieve.store.rules import Request, reuse_of
from small import fill, plan_of
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build

GREEDY = greedy(suppress_tokens=[0], max_new_tokens=8)
FEW = {**GREEDY, "max_new_tokens": 3}
SNAPKV = m.SnapKV(budget=24, window=8, kernel=3)
REST = m.Rotated(bits=2, block=16, tail=4)
KIVI = m.KIVI(bits=2, block=8, group=8, tail=4)
VIEW = m.PerTurn(base=SNAPKV)


@pytest.fixture(scope="module")
def model():
    return tiny_model(filled=True)


def tokens(seed, count):
    return tiny_prompt(1, count, seed=seed, low=3)


def turn_by_turn(sieve, ids, ends, cache, chunk=None):
    """The answer to a conversation whose prompts end at `ends`, on what a cache has read of it."""
    for end in ends[:-1]:
        if end > cache.num_seen:
            sieve.prefill(ids[:, :end], cache=cache, chunk=chunk)
    return sieve.generate(ids, cache=cache, chunk=chunk, **GREEDY).sequences


# The next turn's tokens with which what was read of the answer serves, and with one fewer does not; None: never.
NEXT_TURNS = {
    "full": (Plan(), 1),
    "knorm": (Plan(evict=m.KNorm(budget=24)), 1),
    "snapkv": (Plan(evict=SNAPKV), 8),
    "rest": (Plan(evict=SNAPKV, rest=REST), 32),
    "fastkv": (Plan(propagate=m.TSP(rate=0.3, layer=0, window=4), evict=SNAPKV), None),
    "h2o": (Plan(evict=m.H2O(budget=24, every=None)), None),
    "expectedattention": (Plan(evict=m.ExpectedAttention(budget=24)), None),
    "squeezeattention": (Plan(evict=m.SqueezeAttention(base=SNAPKV)), None),
    "tova": (Plan(evict=m.TOVA(budget=24)), None),
    "codec": (Plan(codec=KIVI), None),
    "codec of what stays": (Plan(evict=SNAPKV, codec=KIVI), None),
    "view": (Plan(evict=VIEW), None),
    "reader": (Plan(read=m.Quest(budget=16)), None),
    "sparse prompts": (plan_of("xattention", None), None),
}


@pytest.mark.parametrize("name", NEXT_TURNS)
def test_a_turn_behind_an_answer(model, name):
    """Anew, the answer is the beginning of the next prompt: what the plan looks back on must be left to read."""
    plan, least = NEXT_TURNS[name]
    ids = tokens(1, 60)
    with kvsieve.attach(model, plan) as sieve, PrefixStore() as store:
        first = sieve.generate(ids, cache=sieve.new_cache(), **GREEDY)
        store.add(sieve, first.sequences[0], first.cache, 1.0)
        for count, served in ((40, least is not None), (least or 1, least is not None), ((least or 1) - 1, False)):
            # The answer's last token was never fed.
            longer = torch.cat([first.sequences, tokens(2, count)], 1)[:, : 60 + 7 + count]
            ends = (60, longer.shape[1])
            found = store.find(sieve, longer[0], turns=ends)
            assert (found is not None and found.tokens == 67) is served, count
            if found is not None:
                expected = turn_by_turn(sieve, longer, ends, sieve.new_cache())
                assert torch.equal(turn_by_turn(sieve, longer, ends, found.cache), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("name", ["view", "codec", "codec of what stays", "snapkv"])
def test_a_prompt_that_ended_is_no_beginning_of_another(family, name):
    """Layers with windows and states cannot be cut: the beginning must have been stored before the prompt's end."""
    plan, model = NEXT_TURNS[name][0], fill(build(family, dtype=torch.float64))
    ids, longer = tokens(3, 60), torch.cat([tokens(3, 60), tokens(4, 5)], 1)
    with kvsieve.attach(model, plan) as sieve, PrefixStore() as store:
        store.add(sieve, ids[0], sieve.prefill(ids, chunk=8), 1.0, turns=(60,), chunk=8)
        found = store.find(sieve, longer[0], turns=(65,), chunk=8)
        cut = family == "llama" and name == "view"
        assert (None if found is None else found.tokens) == (65 - 8 if cut else None)
        store.add(sieve, ids[0], sieve.begin(ids[:, :48], chunk=8), 1.0, chunk=8)
        found = store.find(sieve, longer[0], turns=(65,), chunk=8)
        assert (found is None) is (name == "codec")
        if found is not None:
            assert found.tokens == (57 if cut else 48)
            answer = sieve.generate(longer, cache=found.cache, chunk=8, **FEW)
            assert torch.equal(answer.sequences, sieve.generate(longer, chunk=8, **FEW).sequences)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("xattention", plan_of("xattention", None)),
        ("keydiff", Plan(evict=m.KeyDiff(budget=24, chunks=True))),
        ("codec", Plan(codec=KIVI)),
        ("snapkv", Plan(evict=SNAPKV)),
    ],
)
def test_where_chunks_end(model, name, plan):
    """Sparse prompts serve prompts whose chunks end at the same places; where these are counted from the end, none."""
    ids = tokens(5, 90)
    with kvsieve.attach(model, plan) as sieve, PrefixStore() as store:
        for until, chunk in ((48, 16), (60, 20), (50, 16)):
            store.add(sieve, ids[0], sieve.begin(ids[:, :until], chunk=chunk), 1.0, chunk=chunk)
        for chunk, by_chunks in ((16, 48), (20, 60), (25, None), (None, None)):
            found = store.find(sieve, ids[0], turns=(90,), chunk=chunk)
            wanted = {"snapkv": 60, "codec": None, "keydiff": None}.get(name, by_chunks)
            assert (None if found is None else found.tokens) == wanted
            if found is not None:
                answer = sieve.generate(ids, cache=found.cache, chunk=chunk, **FEW)
                assert torch.equal(answer.sequences, sieve.generate(ids, chunk=chunk, **FEW).sequences)


@pytest.mark.parametrize("name", NEXT_TURNS)
def test_stored_prompts_end_chunks_where_others_do(model, name, monkeypatch):
    """`kvsieve run --store` and a chat's first turn: the border that is stored changes no answer either."""
    monkeypatch.setattr(reuse, "LAST", 20)
    prompts = [tokens(6, 100), torch.cat([tokens(6, 100)[:, :90], tokens(7, 20)], 1), tokens(6, 100)]
    with kvsieve.attach(model, NEXT_TURNS[name][0]) as sieve, PrefixStore() as store:
        for ids in prompts:
            answer = StoredPrefixes(store).generate(sieve, ids, chunk=16, **FEW)
            assert torch.equal(answer.sequences, sieve.generate(ids, chunk=16, **FEW).sequences)
        assert store.stats().hits == (0 if name == "codec" else 2)


def test_nothing_is_cut_from_what_a_propagator_let_through(model):
    """A prompt too short to drop of is held in full, and its hidden states are gone that a longer one chooses by."""
    plan = Plan(propagate=m.TSP(rate=64, layer=1, window=8), evict=m.SnapKV(budget=64, window=8))
    ids = tokens(8, 100)
    with kvsieve.attach(model, plan) as sieve, PrefixStore() as store:
        assert store.add(sieve, ids[0], sieve.prefill(ids[:, :50]), 1.0).serves == "conversation"
        assert store.find(sieve, ids[0], turns=(100,)) is None


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_rotary_tables_of_another_length(name):
    """Nothing of a model is stored whose tables depend on the length of the whole prompt."""
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = fill(build("llama", dtype=torch.float64, rope_parameters=scaled, max_position_embeddings=64))
    with kvsieve.attach(model, NEXT_TURNS[name][0]) as sieve, PrefixStore() as store:
        for count in (40, 150, 50):
            ids = tokens(18, count)
            answer = StoredPrefixes(store).generate(sieve, ids, chunk=16, **FEW)
            assert torch.equal(answer.sequences, sieve.generate(ids, chunk=16, **FEW).sequences)
        assert store.stats().added == 0 and store.stats().refused > 0


def test_a_prompt_that_was_left_whole_did_not_end(model):
    """Neither does a question that the plan was not to see: the plan acted before it."""
    ids, ends = tokens(9, 60), (60, 100)
    longer = torch.cat([ids, tokens(10, 40)], 1)
    with kvsieve.attach(model, Plan(evict=SNAPKV)) as sieve, PrefixStore() as store:
        whole = sieve.prefill(ids, reduce=False)
        assert reuse_of(sieve, whole).turns == () and store.add(sieve, ids[0], whole, 1.0).serves == "beginning"
        assert store.find(sieve, longer[0], turns=ends).tokens == 60 - 8
        asked = sieve.generate(ids, question_tokens=9, **{**GREEDY, "max_new_tokens": 1}).cache
        assert reuse_of(sieve, asked).turns == (51,)
        store.remove(*(node.key for node in store.nodes()))
        store.add(sieve, ids[0], asked, 1.0)
        assert store.find(sieve, longer[0], turns=ends) is None


def test_turns_shorter_than_the_window_are_not_what_reading_anew_gives(model):
    """An answer and a short message after it: anew, the prompt's window reaches into the answer."""
    with kvsieve.attach(model, Plan(evict=SNAPKV)) as sieve:
        for count, same in ((7, False), (8, True)):
            cache = sieve.generate(tokens(11, 60), **GREEDY).cache
            ids = torch.cat([tokens(11, 60), tokens(12, 7), tokens(13, count)], 1)
            sieve.prefill(ids, cache=cache)
            found = reuse_of(sieve, cache)
            assert found.turns == (60, 67 + count) and found.as_prompt is same
            request = Request.of(sieve, 200, 1, (*found.turns, 200))
            assert (found.takes(67 + count, 200, request) > 0) is same


def test_an_answer_of_one_token_is_an_answer(model):
    """It is never read, and yet what goes on behind it goes on with the conversation."""
    ids = tokens(14, 60)
    with kvsieve.attach(model, Plan(evict=SNAPKV)) as sieve, PrefixStore() as store:
        cache = sieve.prefill(ids)
        store.add(sieve, ids[0], cache, 1.0)
        longer = torch.cat([ids, tokens(15, 9)], 1)
        assert store.find(sieve, longer[0]) is None
        store.add(sieve, longer[0, :61], cache, 1.0)
        found = store.find(sieve, longer[0])
        assert found.tokens == 60
        expected = sieve.generate(longer, cache=cache, **GREEDY).sequences
        assert torch.equal(sieve.generate(longer, cache=found.cache, **GREEDY).sequences, expected)


def test_codecs_encode_what_is_only_read(model):
    """A prompt that gets no answer yet is not taken for read where its end would encode it."""
    for plan, tokens_found in ((Plan(codec=m.KIVI(bits=2)), 59), (Plan(evict=VIEW), 52), (Plan(), 60)):
        with kvsieve.attach(model, plan) as sieve, PrefixStore() as store:
            ids = tokens(16, 90)
            store.add(sieve, ids[0], sieve.begin(ids[:, :80]), 1.0)
            found = store.find(sieve, ids[0, :60], turns=(60,), leave=0)
            assert found.tokens == tokens_found


def test_shorter_nodes_stay_where_a_plan_acts(model):
    """Of a conversation below the budget the end of a turn is no beginning of a longer prompt."""
    plan = Plan(evict=dataclasses.replace(SNAPKV, budget=kvsieve.Budget(tokens=500)))
    ids = tokens(17, 80)
    with kvsieve.attach(model, plan) as sieve, PrefixStore() as store:
        cache = sieve.prefill(ids[:, :40])
        store.add(sieve, ids[0, :40], cache, 1.0)
        sieve.prefill(ids, cache=cache)
        store.add(sieve, ids[0], cache, 1.0)
        assert sorted(node.tokens for node in store.nodes()) == [40, 80]
