"""Time for prefill between two tokens of running answers, measured by the clock, on any processor."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from kvsieve.hf.forward.pieces import COUNTS

# Decode passes that estimate how long one takes.
_PASSES = 9
# Seconds of a pass over several chunks.
_PASS = 4.0
# Decay of the longest step's time with each further step.
_FADE = 0.9
# Steps of a pass over several chunks that fit between two tokens: of larger ones, too little time would be used.
_STEPS = 4
# Prompts beyond which the gap no longer grows.
_MOST = 3


def _nobody() -> bool:
    return False


@dataclass
class ReadingPass:
    """A pass of a prefill in progress.

    Attributes:
        chunks: their number.
        seconds: spent so far, without pauses.
    """

    chunks: int = 1
    seconds: float = 0.0


class ReadingPace:
    """Divides time between running answers and prefills.

    A prefill consists of steps, parts of a layer over the chunks of a pass. It pauses before a step that would make the
    gap between two tokens of an answer longer than `gap` times a decode pass alone, but only after at least one step.
    While two prompts wait, that factor is squared, and cubed while more do: a decode pass over few answers takes almost
    as long as over many. The tokens of an answer do not depend on it.

    Args:
        gap: factor by which a prefill may lengthen the gap between tokens; infinite for undivided passes.
        clock: returns seconds.
        finish: waits for the device; None if calls return when it is done.
    """

    def __init__(
        self, gap: float, clock: Callable[[], float] = time.perf_counter, finish: Callable[[], None] | None = None
    ) -> None:
        self.gap = gap
        self._clock = clock
        self._finish = finish
        self._passes: deque[float] = deque(maxlen=_PASSES)
        self._until: float | None = None
        self._room = math.inf
        self._at = self._since = 0.0
        # Of one chunk.
        self._longest = 0.0
        self._per_chunk = math.inf
        self._called = _nobody

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._passes.append(self._clock() - began)

    def begin(self, *, waits: bool, prompts: int = 1, called: Callable[[], bool] = _nobody) -> None:
        """Start a share of prefill.

        Args:
            waits: answers wait for their next token meanwhile.
            prompts: number of prompts that are not prefilled yet.
            called: returns True to pause at the next step; ignored while answers wait.
        """
        self._at = self._since = self._clock()
        self._called = called
        self._room = math.inf
        self._until = None
        if waits and self._passes and self.gap != math.inf:
            gap = self.gap ** min(prompts, _MOST)
            self._room = (gap - 1) * statistics.median(self._passes)
            self._until = self._at + self._room

    def chunks(self, joins: Callable[[], bool]) -> int:
        """Return the number of chunks for the next pass: a few seconds' worth, of steps that fit between two tokens.

        joins: returns whether results stay the same; called only if several chunks are fast enough.
        """
        self._since = self._clock()
        step = 0.0 if self._until is None else _STEPS * (self._longest or math.inf)
        found = max(n for n in COUNTS if n == 1 or (n * self._per_chunk <= _PASS and n * step <= self._room))
        return found if found > 1 and joins() else 1

    def over(self, reading: ReadingPass, *, ends_pass: bool = False) -> bool:
        """Note the end of a step of a pass, and return whether to pause. ends_pass: it was the last one."""
        if self._until is None:
            pauses = ends_pass or self._called()
        else:
            if self._finish is not None:
                self._finish()
            now = self._clock()
            self._longest = max((now - self._at) / reading.chunks, _FADE * self._longest)
            self._at = now
            pauses = now + self._longest * reading.chunks >= self._until
        if pauses or ends_pass:
            now = self._clock()
            reading.seconds += now - self._since
            self._since = now
        if ends_pass:
            self._per_chunk = reading.seconds / reading.chunks
        return pauses

    @property
    def late(self) -> bool:
        """True if a single step exceeded all the time available."""
        return self._until is not None and self._at > self._until


def pace_on(device: torch.device, gap: float) -> ReadingPace:
    return ReadingPace(gap, finish=functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)


class Coroutine(greenlet):
    """Coroutine that prefills a prompt, alternating with other code of the same thread.

    Args:
        run: its function.
        pace: decides when to pause.
    """

    def __init__(self, run: Callable[[], None], pace: ReadingPace) -> None:
        super().__init__(run)
        self._pace = pace
        self._pass = ReadingPass()

    def begin_pass(self, joins: Callable[[], bool]) -> int:
        """Return the number of chunks for the pass that begins. joins: see ReadingPace.chunks."""
        self._pass = ReadingPass(self._pace.chunks(joins))
        return self._pass.chunks

    def rest(self, *, ends_pass: bool = False) -> None:
        """Pause, if it is time. ends_pass: after the last step of a pass."""
        pauses = self._pace.over(self._pass, ends_pass=ends_pass)
        if ends_pass:
            self._pass = ReadingPass()
        if pauses and self.parent is not None:
            self.parent.switch()


def pause_within(layers: Sequence[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
    """Let coroutines pause before the larger parts of layers; return the hooks' handles."""
    parts = [part for layer in layers for part in layer.children() if next(part.children(), None) is not None]
    return [part.register_forward_pre_hook(_rest) for part in parts or layers]


def _rest(module: nn.Module, args: object) -> None:
    current = getcurrent()
    if isinstance(current, Coroutine):
        current.rest()
