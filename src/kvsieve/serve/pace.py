"""Time for prefill between two tokens of running answers, measured by the clock, on any processor."""

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

from kvsieve.hf.forward.pieces import COUNTS

# Decode passes that estimate how long one takes.
_PASSES = 9
# Seconds of a pass while no request waits.
_PASS = 4.0
# Decay of the longest step's time with each further step.
_FADE = 0.9


class ReadingPace:
    """Divides time between running answers and prefills.

    A prefill consists of steps, parts of a layer over one chunk. It pauses before a step that would make the gap
    between two tokens of an answer longer than `gap` times a decode pass alone, but only after at least one step. The
    tokens of a pass, and thus the answers, do not depend on it.

    Args:
        gap: factor by which prefills may lengthen the gap between tokens; infinite for undivided chunks.
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
        self._at = self._longest = 0.0
        self._alone: Callable[[], bool] | None = None
        self._per_chunk = math.inf
        self._joined = 0
        self._pass_began = 0.0

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = self._clock()
        yield
        self._passes.append(self._clock() - began)

    def begin(self, *, waits: bool, alone: Callable[[], bool] | None = None) -> None:
        """Start a share of prefill.

        Args:
            waits: answers wait for their next token meanwhile.
            alone: returns whether there is no other request; None if there is one already.
        """
        self._at = self._clock()
        self._alone = None if waits else alone
        limited = waits and self._passes and self.gap != math.inf
        self._until = self._at + (self.gap - 1) * statistics.median(self._passes) if limited else None

    def chunks(self, joins: Callable[[], bool]) -> int:
        """Return the number of chunks for the next pass: one, or a few seconds' worth if no request waits.

        joins: returns whether results stay the same; called only if several chunks are fast enough.
        """
        found = max(n for n in COUNTS if n == 1 or n * self._per_chunk <= _PASS)
        if self._alone is None or not self._alone() or found == 1 or not joins():
            found = 1
        self._joined, self._pass_began = found, self._clock()
        return found

    def over(self, *, ends_pass: bool = False) -> bool:
        """Note the end of a step and return whether to pause. ends_pass: it was the last of its pass."""
        if ends_pass and self._joined:
            self._per_chunk = (self._clock() - self._pass_began) / self._joined
        if self._until is None:
            return ends_pass or (self._alone is not None and not self._alone())
        if self._finish is not None:
            self._finish()
        now = self._clock()
        self._longest = max(now - self._at, _FADE * self._longest)
        self._at = now
        return now + self._longest >= self._until

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

    def rest(self, *, ends_pass: bool = False) -> None:
        """Pause, if it is time. ends_pass: after the last step of a pass."""
        if self._pace.over(ends_pass=ends_pass) and self.parent is not None:
            self.parent.switch()


def pause_within(layers: Sequence[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
    """Let coroutines pause before the larger parts of layers; return the hooks' handles."""
    parts = [part for layer in layers for part in layer.children() if next(part.children(), None) is not None]
    return [part.register_forward_pre_hook(_rest) for part in parts or layers]


def _rest(module: nn.Module, args: object) -> None:
    current = getcurrent()
    if isinstance(current, Coroutine):
        current.rest()
