"""Time for reading prompts between two tokens, by a clock that tests set."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvsieve.serve.pace import Coroutine, ReadingPace, ReadingPass, pause_within


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def gaps(decode: float, steps: Callable[[int], float], gap: float, noise: float = 0.1) -> tuple[list[float], float]:
    """Gaps between tokens while a long prompt is read, and the share of time that reading has of it.

    Args:
        decode: seconds of a pass over the next tokens.
        steps: seconds of each step of reading.
        gap: of ReadingPace.
        noise: of all times.
    """
    draw, clock = random.Random(1), Clock()
    pace = ReadingPace(gap, clock)

    def takes(seconds: float) -> None:
        clock.now += seconds * draw.uniform(1 - noise, 1 + noise)

    found, step, spent = [], 0, 0.0
    for _ in range(100):
        began = clock.now
        with pace.decoding():
            takes(decode)
        pace.begin(waits=True)
        at = clock.now
        while True:
            takes(steps(step))
            step += 1
            if pace.over(ReadingPass()):
                break
        spent += clock.now - at
        found.append(clock.now - began)
    return found, spent / sum(found)


PROCESSORS = [(decode, share) for decode in (0.001, 0.06, 2.0) for share in (0.005, 0.03, 0.3, 0.7, 1.2)]


@pytest.mark.parametrize("decode, share", PROCESSORS)
def test_running_answers_wait_at_most_three_times_as_long(decode, share):
    # Attention takes longer the more was read before, the rest of a layer does not.
    def step(number: int) -> float:
        return decode * share * (min(1.0, 0.3 + number / 4_000) if number % 2 else 0.6)

    found, reading = gaps(decode, step, 2.5)
    assert statistics.quantiles(found, n=20)[-1] < 3 * 0.9 * decode
    # Nor does reading starve: it has what they can spare, but for part of a step.
    assert reading > (0.5 if share <= 0.3 else 0.3)


def test_a_step_that_takes_longer_is_read_alone_and_told():
    clock = Clock()
    pace = ReadingPace(2.5, clock)
    with pace.decoding():
        clock.now += 1.0
    pace.begin(waits=True)
    clock.now += 4.0
    assert pace.over(ReadingPass()) and pace.late
    pace.begin(waits=True)
    clock.now += 0.1
    # Another one like that would be too long.
    assert pace.over(ReadingPass()) and not pace.late


def test_where_nobody_waits_whole_chunks_are_read():
    clock = Clock()
    pace = ReadingPace(2.5, clock)
    for measured in (False, True, True):
        pace.begin(waits=not measured or pace.gap == math.inf)
        clock.now += 50.0
        assert not pace.over(ReadingPass()) and pace.over(ReadingPass(), ends_pass=True) and not pace.late
        with pace.decoding():
            clock.now += 0.1
        pace.gap = math.inf if measured else pace.gap


def test_prompts_that_wait_lengthen_the_gap_up_to_three_of_them():
    clock = Clock()
    pace = ReadingPace(2.0, clock)
    with pace.decoding():
        clock.now += 1.0
    steps = []
    for prompts in (1, 2, 3, 9):
        pace.begin(waits=True, prompts=prompts)
        steps.append(1)
        clock.now += 0.1
        while not pace.over(ReadingPass()):
            clock.now += 0.1
            steps[-1] += 1
    assert steps == pytest.approx([9, 29, 69, 69], abs=1)


def test_a_pass_that_no_answer_waits_for_takes_several_chunks_within_seconds():
    clock, called = Clock(), [False]
    pace = ReadingPace(2.5, clock)

    def chunks(seconds: float, *, joins: bool = True) -> int:
        pace.begin(waits=False, called=lambda: called[0])
        reading = ReadingPass(pace.chunks(lambda: joins))
        clock.now += seconds * reading.chunks
        assert not pace.over(reading) and pace.over(reading, ends_pass=True)
        return reading.chunks

    # How long a chunk takes is not known before the first.
    found = [chunks(0.8), chunks(0.8), chunks(2.4), chunks(0.4), chunks(0.4), chunks(0.4, joins=False)]
    assert found == [1, 4, 4, 1, 8, 1]
    # Whoever comes or leaves is served at the next step.
    pace.begin(waits=False, called=lambda: called[0])
    reading = ReadingPass(pace.chunks(lambda: True))
    assert reading.chunks == 8 and not pace.over(reading)
    called[0] = True
    assert pace.over(reading)


def test_several_chunks_are_read_between_tokens_if_a_few_of_their_steps_fit():
    clock = Clock()
    pace = ReadingPace(2.0, clock)
    with pace.decoding():
        clock.now += 1.0

    def chunks(step: float, prompts: int = 1) -> int:
        """Of a pass of ten steps, each so long per chunk."""
        pace.begin(waits=True, prompts=prompts)
        reading = ReadingPass(pace.chunks(lambda: True))
        for number in range(10):
            clock.now += step * reading.chunks
            if pace.over(reading, ends_pass=number == 9):
                # Answers get their tokens; that is no part of the pass.
                clock.now += 1000.0
                pace.begin(waits=True, prompts=prompts)
        return reading.chunks

    assert [chunks(0.1), chunks(0.1), chunks(0.1, prompts=4)] == [1, 2, 4]
    for _ in range(40):
        chunks(0.02)
    assert [chunks(0.02), chunks(0.5), chunks(0.5)] == [8, 8, 1]


def test_one_slow_pass_does_not_count_for_long():
    clock = Clock()
    pace = ReadingPace(2.0, clock)
    for seconds in (30.0, 0.1, 0.1):
        with pace.decoding():
            clock.now += seconds
    pace.begin(waits=True)
    clock.now += 0.04
    assert not pace.over(ReadingPass())
    clock.now += 0.04
    assert pace.over(ReadingPass())


def test_a_device_is_waited_for_where_time_is_limited():
    waited = []
    pace = ReadingPace(2.0, Clock(), lambda: waited.append(1))
    pace.begin(waits=False)
    pace.over(ReadingPass())
    assert not waited
    with pace.decoding():
        pass
    pace.begin(waits=True)
    pace.over(ReadingPass())
    assert waited


def test_layers_are_left_and_gone_on_with_between_their_parts():
    layers = [nn.ModuleDict({"norm": nn.LayerNorm(2), "mlp": nn.Sequential(nn.Linear(2, 2))}) for _ in range(3)]
    plain = nn.Linear(2, 2)
    hooks, found = [*pause_within(layers), *pause_within([plain])], []
    pace = ReadingPace(1.0, Clock())
    with pace.decoding():
        pass

    def run() -> None:
        value = torch.zeros(1, 2)
        for layer in layers:
            value = layer["mlp"](layer["norm"](value))
        found.append(plain(value))

    coroutine, turns = Coroutine(run, pace), 0
    while not coroutine.dead:
        pace.begin(waits=True)
        coroutine.switch()
        turns += 1
        # Others who run the same layers are not held up.
        layers[0]["mlp"](torch.zeros(1, 2))
    assert turns == 5 and found
    for hook in hooks:
        hook.remove()
