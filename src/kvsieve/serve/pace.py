"""Time for reading prompts between two tokens of running answers, by the clock, on any processor."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from greenlet import getcurrent, greenlet
from torch import nn

# Passes over the next token that tell how long one takes.
_PASSES = 9
# The longest step is forgotten by so much with each further one.
_FADE = 0.9


class ReadingPace:
    """Divides time between running answers and prompts that are read.

    Reading consists of steps, parts of a layer over one chunk. It stops where the next step would make the gap between
    two tokens of an answer longer than `gap` times a pass over the next tokens alone, but never before one step.
    Which tokens a pass reads does not depend on it, so neither does any answer.

    Args:
        gap: how many times as long the gap between tokens may be while prompts are read; infinite for whole chunks.
        clock: tells seconds.
        finish: waits until the device has done what it was given; None where it has when a call returns.
    """

    def __init__(
        self, gap: float, clock: Callable[[], float] = time.perf_counter, finish: Callable[[], None] | None = None
    ) -> None:
        self.gap, self._clock, self._finish = gap, clock, finish
        self._passes: deque[float] = deque(maxlen=_PASSES)
        self._until: float | None = None
        self._at = self._longest = 0.0

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Note how long a pass over the next tokens takes."""
        began = self._clock()
        yield
        self._passes.append(self._clock() - began)

    def begin(self, *, waits: bool) -> None:
        """Begin to read. waits: answers wait for their next token meanwhile."""
        self._at = self._clock()
        limited = waits and self._passes and self.gap != math.inf
        self._until = self._at + (self.gap - 1) * statistics.median(self._passes) if limited else None

    def over(self, *, ends_pass: bool = False) -> bool:
        """Note that a step was read, and tell whether to stop here. ends_pass: it was the last of its chunk."""
        if self._until is None:
            return ends_pass
        if self._finish is not None:
            self._finish()
        now = self._clock()
        self._longest = max(now - self._at, _FADE * self._longest)
        self._at = now
        return now + self._longest >= self._until

    @property
    def late(self) -> bool:
        """True where a single step took more than all the time there was."""
        return self._until is not None and self._at > self._until


def pace_on(device: torch.device, gap: float) -> ReadingPace:
    """Return the pace of a scheduler whose model is on a device."""
    return ReadingPace(gap, finish=functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None)


class Coroutine(greenlet):
    """A coroutine that a prompt is read in, beside other code of the same thread.

    Args:
        run: what runs in it.
        pace: tells when to let others go on.
    """

    def __init__(self, run: Callable[[], None], pace: ReadingPace) -> None:
        super().__init__(run)
        self._pace = pace

    def rest(self, *, ends_pass: bool = False) -> None:
        """Let whoever runs this go on, if it is time."""
        if self._pace.over(ends_pass=ends_pass) and self.parent is not None:
            self.parent.switch()


def pause_within(layers: Sequence[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
    """Let coroutines rest before the larger parts of layers; returns the hooks' handles."""
    parts = [part for layer in layers for part in layer.children() if next(part.children(), None) is not None]
    return [part.register_forward_pre_hook(_rest) for part in parts or layers]


def _rest(module: nn.Module, args: object) -> None:
    if torch.compiler.is_compiling():
        return
    current = getcurrent()
    if isinstance(current, Coroutine):
        current.rest()
