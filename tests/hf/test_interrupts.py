"""An interrupt at any place of a turn leaves the chat as it was before, or with the whole turn; never locked."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time

import pytest
import torch

import kvsieve
from interrupts import Interrupts
from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.chat import chat as chats
from kvsieve.hf.chat import worker
from kvsieve.hf.forward import passes as sessions
from tiny_models import build
from toy_chats import chat_tokenizer

pytestmark = pytest.mark.slow

OPTIONS = {"suppress_tokens": [0, 1, 2], "max_new_tokens": 2}
FINE = [worker.streamed, chats.Chat._alone, chats.Chat._settle, worker.Worker.wait, worker.Worker.__init__]
FINE += [
    chats.Chat.ask,
    chats.Chat.retry,
    chats.Chat._take,
    chats.Chat.read,
    chats.Chat.rollback,
    chats.Chat.fork,
    chats.Chat.snapshot,
]
FINE += [SieveCache.rollback]
COARSE = ("/hf/edit/editor.py", "/hf/edit/moved.py", "/hf/chat/chat.py", "/hf/chat/turn.py", "/hf/cache/cache.py")


@pytest.fixture(scope="module")
def sieve():
    model = build("llama", num_hidden_layers=2)
    with kvsieve.attach(model, kvsieve.plan("snapkv", paper=True, budget=12, window=2)) as made:
        yield made


@pytest.fixture
def chat(sieve):
    made = sieve.chat(chat_tokenizer(), retry=True, **OPTIONS)
    made.ask("w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13")
    return made


def told(chat):
    """All that a turn changes."""
    stored = [[part.tolist() for part in (layer.store.keys, layer.store.index)] for layer in chat.cache.layers]
    return chat.messages, chat.ids.tolist(), chat.context, len(chat.turns), chat.cache.num_seen, stored


def working():
    return [each for each in threading.enumerate() if each.name == "kvsieve-chat"]


def streamed(chat):
    for _ in chat.stream("w5 w6"):
        pass


def left(chat):
    with contextlib.closing(chat.stream("w5 w6")) as stream:
        next(stream)


def left_at_the_end(chat):
    """All was said, and the generator has not ended."""
    with contextlib.closing(chat.stream("w5 w6")) as stream:
        for _ in range(2):
            next(stream)


def failed(chat):
    def fail(piece):
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        chat.ask("w5 w6", on_text=fail)


ACTS = {
    "ask": lambda chat: chat.ask("w5 w6"),
    "ask, and on_text fails": failed,
    "stream": streamed,
    "stream that is left": left,
    "stream that is left at its end": left_at_the_end,
    "retry": lambda chat: chat.retry(max_new_tokens=1),
    "read": lambda chat: chat.read("w5 w6"),
    "fork": lambda chat: chat.fork(),
    "replace": lambda chat: chat.replace(0, "w1 w2 w9 w4 w5 w6 w7 w8", window=2),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_interrupt_at_any_place(chat, name):
    act, start = ACTS[name], chat.snapshot()
    before = told(chat)
    interrupts = Interrupts(FINE, COARSE)
    places = interrupts.places(lambda: act(chat))
    after = told(chat)
    assert (after == before) == (name not in ("ask", "stream", "retry", "read", "replace")) and len(places) > 100
    chat.rollback(start)
    came = 0
    for place in places:
        came += interrupts.raised(lambda: act(chat), place)
        # Nobody is at work any more who could change this.
        assert not working() and sessions._ACTIVE.get() is None, place
        found = told(chat)
        assert found in (before, after), place
        chat.rollback(start)
        assert told(chat) == before, place
    assert came > 0.9 * len(places)
    assert act(chat) is None or told(chat) == after


def test_an_interrupt_at_any_place_of_a_rollback(chat):
    start, before = chat.snapshot(), told(chat)
    chat.ask("w5 w6")
    later, after = chat.snapshot(), told(chat)
    interrupts = Interrupts(FINE, COARSE)
    for place in interrupts.places(lambda: chat.rollback(start)):
        chat.rollback(later)
        interrupts.raised(lambda: chat.rollback(start), place)
        assert told(chat) in (before, after), place
    chat.rollback(start)
    assert told(chat) == before


def test_a_stream_counts_once_it_has_ended(chat):
    """The model is ahead of who reads; what it has finished is not taken behind the reader's back."""
    before = told(chat)
    stream = chat.stream("w5 w6")
    pieces = [next(stream), next(stream)]
    (worker,) = working()
    while sys._current_frames()[worker.ident].f_code.co_name != "turn":
        time.sleep(0.001)
    with pytest.raises(CacheStateError, match="in progress"):
        chat.ask("w7")
    stream.close()
    assert told(chat) == before and all(pieces) and not working()


def test_interrupts_of_somebody_impatient(chat):
    """While the generator waits for its thread to stop, more of them come: it waits all the same."""
    before, came = told(chat), []

    class Impatient:
        def __init__(self, queue):
            self.queue = queue

        def __getattr__(self, name):
            return getattr(self.queue, name)

        def get(self):
            if len(came) < 5:
                came.append(1)
                raise KeyboardInterrupt
            return self.queue.get()

    stream = chat.stream("w5 w6", max_new_tokens=50)
    next(stream)
    (worker,) = working()
    worker._end = Impatient(worker._end)
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    assert len(came) == 5 and not worker.is_alive() and told(chat) == before


@pytest.mark.parametrize("name", ["stream that is left", "stream that fails"])
def test_a_turn_that_is_over_leaves_no_garbage(chat, name):
    """What it has made, tensors among it, would stay until the next collection."""

    def act():
        if name == "stream that is left":
            left(chat)
        else:
            with contextlib.suppress(ZeroDivisionError):
                list(chat.stream("w5 w6", progress=lambda done, total: 1 // 0))

    act()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        act()
        gc.collect()
        found = [each for each in gc.garbage if isinstance(each, (torch.Tensor, threading.Thread))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not found


def test_a_thread_that_begins_late_does_nothing(chat, monkeypatch):
    """An interrupt in Thread.start may come before the thread has begun."""
    before, held = told(chat), []

    def start(self):
        held.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(worker.Worker, "start", start)
        with pytest.raises(KeyboardInterrupt):
            list(chat.stream("w5 w6"))
    held[0].start()
    held[0].join()
    assert told(chat) == before and chat.ask("w5 w6").text


def test_an_interrupt_within_a_pass_closes_its_session(sieve):
    """Also where it comes between the session's being current and its being known."""
    ids = torch.arange(3, 20)[None]
    interrupts = Interrupts([sessions.open_session, sessions.close_session], ())
    wanted = sieve.prefill(ids).entries()
    for place in interrupts.places(lambda: sieve.prefill(ids)):
        assert interrupts.raised(lambda: sieve.prefill(ids), place)
        assert sessions._ACTIVE.get() is None, place
    assert sieve.prefill(ids).entries() == wanted


def test_a_cache_whose_pass_was_not_closed_is_refused(sieve):
    ids, taken = torch.arange(3, 20)[None], []
    interrupts = Interrupts([sessions.close_session], ())

    def act():
        taken.append(sieve.new_cache())
        sieve.prefill(ids, cache=taken[-1])

    for place in interrupts.places(act):
        interrupts.raised(act, place)
        cache = taken[-1]
        if cache.status == "broken":
            with pytest.raises(CacheStateError):
                sieve.prefill(torch.arange(3, 30)[None], cache=cache)
        else:
            assert cache.num_seen == 17 and not cache.turn.reading, place
