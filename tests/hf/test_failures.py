"""Calls that fail half-way or are not what they seem, copies and pickles, two attachments at once, compiled models."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from transformers import StoppingCriteria

import kvsieve
from kvsieve.errors import CacheStateError, InputError, KvsieveError, KvsieveWarning, UnsupportedModelError
from kvsieve.hf import attach
from kvsieve.hf.compat import CACHE
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build
from toy_chats import chat_tokenizer

GREEDY = greedy(max_new_tokens=6)
PLAN = kvsieve.plan("snapkv", budget=20, window=4, paper=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(filled=True)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, 80, seed=0, low=3, high=100)


class Streamer:
    """Its reader is gone at a call of `put`: the first is shown the prompt."""

    def __init__(self, error, at=4):
        self.error, self.at, self.calls = error, at, 0

    def put(self, value):
        self.calls += 1
        if self.calls == self.at:
            raise self.error

    def end(self):
        pass


class Criterion(StoppingCriteria):
    def __init__(self, error):
        self.error, self.calls = error, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


def failing(error):
    def fail(*args):
        raise error

    return fail


def in_a_layer(sieve, ids, cache, error):
    handle = sieve.layers[-1].register_forward_hook(failing(error))
    try:
        sieve.generate(ids, cache=cache, **GREEDY)
    finally:
        handle.remove()


CALLS = {
    "streamer": lambda sieve, ids, cache, error: sieve.generate(ids, cache=cache, streamer=Streamer(error), **GREEDY),
    "criterion": lambda sieve, ids, cache, error: sieve.generate(
        ids, cache=cache, stopping_criteria=[Criterion(error)], **GREEDY
    ),
    "progress of generate": lambda sieve, ids, cache, error: sieve.generate(
        ids, cache=cache, chunk=8, progress=failing(error), **GREEDY
    ),
    "progress of prefill": lambda sieve, ids, cache, error: sieve.prefill(
        ids, cache=cache, chunk=8, progress=failing(error)
    ),
    "progress of begin": lambda sieve, ids, cache, error: sieve.begin(
        ids, cache=cache, chunk=8, progress=failing(error)
    ),
    "plain generate": lambda sieve, ids, cache, error: sieve.model.generate(
        ids, streamer=Streamer(error), **{CACHE: cache}, **GREEDY
    ),
    "layer": in_a_layer,
}


@pytest.mark.parametrize("error", [ConnectionError("gone"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("seen", [0, 40])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_half_way_leaves_a_cache_that_is_refused(model, ids, name, seen, error):
    """Its caller does not know which tokens it holds; a rollback brings back what was known."""
    with kvsieve.attach(model, PLAN) as sieve:
        cache = sieve.prefill(ids[:, :seen]) if seen else sieve.new_cache()
        before = cache.snapshot()
        wanted = sieve.generate(ids, cache=cache.fork(), **GREEDY)
        with pytest.raises(type(error)):
            CALLS[name](sieve, ids, cache, error)
        for call in (sieve.generate, sieve.prefill, sieve.begin):
            with pytest.raises(CacheStateError, match="failed half-way"):
                call(ids, cache=cache)
        cache.rollback(before)
        assert torch.equal(sieve.generate(ids, cache=cache, **GREEDY).sequences, wanted.sequences)


@pytest.mark.parametrize("method", ["full", "gemfilter"])
@pytest.mark.parametrize("error", [ValueError("closed"), MemoryError(), torch.OutOfMemoryError("full")])
def test_the_error_of_a_streamer_that_is_shown_the_prompt_is_raised_as_it_is(model, ids, method, error):
    given = {} if method == "full" else {"budget": "50%", "layer": 1, "paper": True}
    with kvsieve.attach(model, kvsieve.plan(method, **given)) as sieve, pytest.raises(type(error)) as raised:
        sieve.generate(ids, streamer=Streamer(error, at=1), **GREEDY)
    assert raised.value is error


def test_a_call_that_fed_nothing_leaves_the_cache_as_it_was(model, ids):
    with kvsieve.attach(model, PLAN) as sieve:
        cache = sieve.prefill(ids[:, :40])
        wanted = sieve.generate(ids, cache=cache.fork(), **GREEDY)
        with pytest.raises(InputError):
            sieve.generate(ids, cache=cache, max_new_tokens=2, temperature="warm", do_sample=True)
        with pytest.raises(InputError):
            sieve.prefill(ids, cache=cache, protect=[(0, 80)])
        assert not cache.conversation.half_read and cache.turn.number == 0
        assert torch.equal(sieve.generate(ids, cache=cache, **GREEDY).sequences, wanted.sequences)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "streamingllm"])
def test_a_cache_is_deep_copied_as_it_is_forked(model, ids, method):
    with kvsieve.attach(model, kvsieve.plan(method, budget=36)) as sieve:
        cache = sieve.prefill(ids[:, :40])
        copies = [copy.deepcopy(cache), copy.copy(cache), cache.fork(), cache]
        answers = [sieve.generate(ids, cache=each, **GREEDY).sequences for each in copies]
        assert all(torch.equal(answers[0], each) for each in answers)


def test_a_chat_is_copied_as_it_is_forked(model):
    with kvsieve.attach(model, PLAN) as sieve:
        chat = sieve.chat(chat_tokenizer(), max_new_tokens=4)
        chat.ask("w1 w2 w3")
        copies = [copy.deepcopy(chat), copy.copy(chat), chat.fork()]
        wanted = chat.ask("w4").tokens
        assert [each.ask("w4").tokens for each in copies] == [wanted] * 3


def test_a_cache_is_used_by_one_thread_at_a_time(model, ids):
    """The call that has the cache is not disturbed; the other one is refused, and may come again."""
    with kvsieve.attach(model, PLAN) as sieve:
        cache, refused = sieve.prefill(ids[:, :40]), []
        wanted = sieve.generate(ids, cache=cache.fork(), **GREEDY).sequences

        longer = torch.cat([ids, ids], 1)

        def plain(ids, cache):
            model.generate(ids, **{CACHE: cache})

        def use():
            for call in (sieve.generate, sieve.prefill, sieve.begin, plain):
                with pytest.raises(CacheStateError) as raised:
                    call(longer, cache=cache)
                refused.append("another thread" in str(raised.value))

        class Other(Streamer):
            def put(self, value):
                self.calls += 1
                if self.calls == 3:
                    thread = threading.Thread(target=use)
                    thread.start()
                    thread.join()

        assert torch.equal(sieve.generate(ids, cache=cache, streamer=Other(None), **GREEDY).sequences, wanted)
        assert refused == [True] * 4
        answers = []
        again = torch.cat([wanted, ids[:, :8]], 1)
        thread = threading.Thread(target=lambda: answers.append(sieve.generate(again, cache=cache, **GREEDY)))
        thread.start()
        thread.join()
        assert len(answers) == 1


def test_what_a_plan_runs_on_is_not_pickled(model, ids):
    with kvsieve.attach(model, PLAN) as sieve:
        result = sieve.generate(ids, **GREEDY)
        chat = sieve.chat(chat_tokenizer(), max_new_tokens=2)
        for held in (model, model.model, model.model.layers[1], model.model.layers[1].mlp, sieve, chat, result):
            with pytest.raises(KvsieveError):
                pickle.dumps(held)
        for held in (result.cache, result.cache.snapshot()):
            with pytest.raises(KvsieveError, match=r"sieve.save\(cache, path\)"):
                pickle.dumps(held)
        for held in (model, model.model, model.model.layers[1], sieve, kvsieve.attach(model, PLAN)):
            with pytest.raises(KvsieveError):
                copy.deepcopy(held)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        wanted = model.generate(ids, **GREEDY)
        assert torch.equal(again.generate(ids, **GREEDY), wanted)


def test_a_second_thread_is_refused_at_any_moment_of_attaching(model, ids, monkeypatch):
    """Both would note what the model had before, and one of them what the other has put there."""
    told, before = [], dict(vars(model))

    def attach_too():
        try:
            with kvsieve.attach(model, PLAN):
                told.append("attached")
        except KvsieveError as error:
            told.append(str(error))

    def in_between(function):
        def run(*args, **kwargs):
            out = function(*args, **kwargs)
            thread = threading.Thread(target=attach_too)
            thread.start()
            thread.join()
            return out

        return run

    for name in ("check_model", "Sieve"):
        monkeypatch.setattr(attach, name, in_between(getattr(attach, name)))
    monkeypatch.setattr(attach.hooks, "install", in_between(attach.hooks.install))
    with kvsieve.attach(model, PLAN) as sieve:
        sieve.generate(ids, **GREEDY)
    monkeypatch.undo()
    assert len(told) == 3 and all("attached already" in each for each in told)
    assert vars(model).keys() == before.keys() and model.config._attn_implementation == "sdpa"
    with kvsieve.attach(model, PLAN) as sieve:
        assert sieve.generate(ids, **GREEDY).stats.applied


@pytest.mark.parametrize("part", ["model", "forward", "decoder", "layers", "attention"])
def test_a_compiled_model_is_refused(ids, part):
    model = build("llama")
    if part == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif part == "layers":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = torch.compile(layer, backend="eager")
    elif part == "attention":
        model.model.layers[0].self_attn.compile(backend="eager")
    else:
        {"model": model, "decoder": model.model}[part].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="torch.compile"), kvsieve.attach(model, PLAN) as sieve:
        sieve.generate(ids, **GREEDY)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_in_the_wrapper_of_compile_generates(model, ids):
    with kvsieve.attach(model, PLAN) as sieve:
        wanted = sieve.generate(ids, **GREEDY).sequences
    with kvsieve.attach(torch.compile(model, backend="eager"), PLAN) as sieve:
        assert torch.equal(sieve.generate(ids, **GREEDY).sequences, wanted)
        assert torch.equal(sieve.generate(ids, draft="lookup:adapt=false", **GREEDY).sequences, wanted)
    # Nothing of the plan stays on the model within.
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("method", "given", "size", "warned"),
    [
        ("snapkv", {"window": 12}, 11, True),
        ("snapkv", {"window": 12}, 12, False),
        ("streamingllm", {}, 3, True),
        ("quest", {}, 7, True),
        ("quest", {}, 8, False),
        ("streamingllm", {}, 1, False),
        ("full", {}, 3, False),
        ("kivi", {}, 3, False),
    ],
)
def test_few_tokens_at_once_in_plain_calls_are_warned_of_once(model, ids, method, given, size, warned):
    budget = {} if method in ("full", "kivi") else {"budget": 30}
    with kvsieve.attach(model, kvsieve.plan(method, **budget, **given)) as sieve, torch.no_grad():
        cache, told = sieve.new_cache(), []
        model(ids[:, :40], **{CACHE: cache})
        for at in range(40, 40 + 3 * size, size):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(ids[:, at : at + size], **{CACHE: cache})
            told.append([each for each in caught if each.category is KvsieveWarning])
        assert list(map(len, told)) == [0, int(warned), 0]
        if warned:
            assert f"{size} now" in str(told[1][0].message) and "one at a time" in str(told[1][0].message)
        assert cache.turn.number == (0 if size == 1 else 3)
