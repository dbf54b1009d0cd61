"""Cores that other programs use are left to them, within passes, and no answer changes."""

from __future__ import annotations

import threading

import pytest
import torch

import kvsieve
from kvsieve.kernels.cpu import cores
from kvsieve.kernels.cpu.cores import Meter, Use, asked_threads, read_use, threads_beside
from small import plan_of
from tiny import tiny_prompt
from tiny_models import build


@pytest.mark.parametrize(
    ("asked", "of", "others", "left"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.39, 2),
        (2, 2, 0.5, 1),
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (16, 16, 1.3, 15),
        (16, 16, 1.5, 14),
        (4, 16, 10.0, 4),
        (4, 16, 13.0, 3),
        (1, 2, 2.0, 1),
        (4, 2, 0.1, 4),
        (4, 2, 1.0, 1),
    ],
)
def test_a_pass_takes_the_cores_that_others_leave(asked, of, others, left):
    assert threads_beside(asked, of, others) == left


def test_use_is_what_others_took_since_it_was_read_before():
    now = iter([Use(0.0, 100.0, 40.0), Use(2.0, 103.0, 41.0), Use(4.0, 104.0, 42.5), None])
    meter = Meter(lambda: next(now))
    # One of three seconds was this process's own; then counting by ticks says less than it used.
    assert [meter.others() for _ in range(2)] == [1.0, 0.0]
    assert meter.others() == 0.0 and meter.others() == 0.0


def test_a_pass_does_not_go_by_what_others_used_long_before():
    now = iter([Use(0.0, 0.0, 0.0), Use(60.0, 120.0, 0.0), Use(61.0, 121.0, 1.0)])
    meter = Meter(lambda: next(now))
    meter.begin()
    assert meter.others() == 0.0


def test_use_is_not_read_again_at_once():
    readings = []
    meter = Meter(lambda: readings.append(1) or read_use())
    for _ in range(5):
        meter.others()
    assert len(readings) == 1 or read_use() is None


@pytest.fixture
def beside(monkeypatch):
    """Two cores and two threads, and another program on one of them; returns the threads that layers were run with."""

    class Busy:
        cores, used = 2, 1.0

        def begin(self) -> None: ...

        def others(self) -> float:
            return self.used

    before, seen, look = torch.get_num_threads(), [], cores.look
    monkeypatch.setattr(cores, "_meter", Busy())
    monkeypatch.setattr(cores, "look", lambda: (look(), seen.append((torch.get_num_threads(), asked_threads())))[0])
    torch.set_num_threads(2)
    yield seen
    torch.set_num_threads(before)


def answer(model, name: str, way: str) -> torch.Tensor:
    ids = tiny_prompt(1, 300, seed=1, low=5, high=90)
    with kvsieve.attach(model, plan_of(name, model)) as sieve:
        if way == "generate":
            return model.generate(ids, max_new_tokens=8, do_sample=False)
        if way == "chunks":
            return sieve.generate(ids, chunk=64, max_new_tokens=8, do_sample=False).sequences
        with torch.no_grad():
            return model(ids).logits


@pytest.mark.parametrize("name", ["full", "snapkv", "kivi", "rocketkv", "fastkv", "gemfilter"])
@pytest.mark.parametrize("way", ["generate", "chunks", "call"])
def test_every_layer_leaves_the_core_and_answers_as_before(beside, monkeypatch, name, way):
    if way != "chunks" and name == "gemfilter":
        pytest.skip("reads a prompt twice, which a plain call cannot do")
    model = build("llama")
    found = answer(model, name, way)
    assert beside and set(beside) == {(1, 2)}
    assert torch.get_num_threads() == 2
    beside.clear()
    cores._meter.used = 0.0
    assert torch.equal(answer(model, name, way), found)
    assert beside and set(beside) == {(2, 2)}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_threads_come_back_behind_a_pass_that_fails(beside, error):
    model = build("llama")

    def fail(*given: object) -> None:
        assert torch.get_num_threads() == 1
        raise error

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error), kvsieve.attach(model, plan_of("full", model)):
        model.generate(torch.ones(1, 20, dtype=torch.long), max_new_tokens=2)
    handle.remove()
    assert torch.get_num_threads() == 2


def test_a_thread_that_begins_meanwhile_has_all_of_them_behind_its_own_pass(beside):
    model, found = build("llama"), []

    def begin(*given: object) -> None:
        if not found:
            found.append(0)
            other = threading.Thread(target=lambda: (one_pass(), found.append(torch.get_num_threads())))
            other.start()
            other.join()

    def one_pass() -> None:
        cores.begin()
        cores.look()
        cores.end()

    model.model.layers[1].mlp.register_forward_pre_hook(begin)
    with kvsieve.attach(model, plan_of("full", model)), torch.no_grad():
        model(torch.ones(1, 20, dtype=torch.long))
    assert found == [0, 2]


def test_threads_stay_where_they_are_fixed(beside, monkeypatch):
    monkeypatch.setattr(cores, "_SWITCHED_ON", False)
    answer(build("llama"), "full", "generate")
    assert set(beside) == {(2, 2)}
