"""Limit of a pass's threads to the cores that no other program uses.

Each product of a layer waits for its slowest thread. A thread that shares its core with another program takes twice as
long; without it, a pass takes only the time of the remaining threads.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_log = logging.getLogger(__name__)

_SWITCHED_ON = os.environ.get("KVSIEVE_THREADS") != "fixed"
# Seconds over which use is measured: the kernel counts it in hundredths.
_WINDOW = 0.2
# Seconds after which a measurement before a pass is too old for it.
_OLD = 1.0
# Share of a core that others may use before the pass avoids it: a program that competes with a thread for a core gets
# half of it.
_SHARE = 0.4


class Use(NamedTuple):
    """Seconds so far: by the clock, busy on this process's cores, and used by this process."""

    clock: float
    busy: float
    own: float


def read_use() -> Use | None:
    """Return the use of the cores that this process may run on; None if the system does not report it."""
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in iter(file.readline, "") if line.startswith("cpu")]
        own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        # user, nice, system, then interrupts; 3 and 4 are idle, and 7 is time that a hypervisor gave to others.
        ticks = sum(int(line[at]) for line in lines if line[0] in own for at in (1, 2, 3, 6, 7))
        return Use(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class Meter:
    """Meter of how many of this process's cores others keep busy. cores: those it may run on."""

    def __init__(self, read: Callable[[], Use | None] = read_use) -> None:
        self._read = read
        self._lock = threading.Lock()
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._last = read()
        self._others = 0.0

    def begin(self) -> None:
        """Discard old measurements at the start of a pass."""
        if self._last is not None and time.perf_counter() - self._last.clock > _OLD:
            self._last = self._read()
            self._others = 0.0

    def others(self) -> float:
        """Return how many cores others have used, on average, since the last reading."""
        last = self._last
        if last is None or time.perf_counter() - last.clock < _WINDOW or not self._lock.acquire(blocking=False):
            return self._others
        try:
            now = self._read()
            if now is not None and now.clock > last.clock:
                self._others = max(0.0, now.busy - last.busy - now.own + last.own) / (now.clock - last.clock)
            self._last = now
        finally:
            self._lock.release()
        return self._others


def threads_beside(asked: int, cores: int, others: float) -> int:
    """Return the number of threads for a pass.

    Args:
        asked: torch's threads.
        cores: cores that this process may run on.
        others: cores that others use, on average.
    """
    taken = math.ceil(others - _SHARE)
    return asked if taken <= 0 else max(1, min(asked, cores - taken))


class _Own(threading.local):
    """State of one thread: depth of nested passes, and torch's threads before the outermost (`asked`)."""

    depth = 0
    asked = 0


_own = _Own()
_meter: Meter | None = None
# Threads that some pass has found and the number it has set; equal if it leaves no core to others.
_found = 0
_left = 0


def asked_threads() -> int:
    """Return torch's threads without other programs' load, which choices may depend on."""
    return _own.asked if _own.depth else torch.get_num_threads()


def begin() -> None:
    """Begin a pass, or a nested part of one."""
    if not _own.depth:
        threads = torch.get_num_threads()
        # A thread that began during such a pass got that pass's number.
        _own.asked = _found if threads == _left < _found else threads
        if _meter is not None:
            _meter.begin()
    _own.depth += 1


def end(*, all_parts: bool = False) -> None:
    """End the part begun last, and restore torch's threads after the outermost.

    all_parts: end all parts that this thread has begun.
    """
    if not _own.depth:
        return
    _own.depth = 0 if all_parts else _own.depth - 1
    if not _own.depth and torch.get_num_threads() != _own.asked:
        _set(_own.asked)


def look() -> None:
    """Set torch's threads within a pass to the number of cores that others do not use."""
    global _meter
    if _own.asked == 1 or not _own.depth or not _SWITCHED_ON:
        return
    _meter = _meter or Meter()
    threads = threads_beside(_own.asked, _meter.cores, _meter.others())
    if threads != torch.get_num_threads():
        _log.info("%d of %d threads: other programs keep %.1f cores busy", threads, _own.asked, _meter.others())
        _set(threads)


def _set(threads: int) -> None:
    global _found, _left
    _found = _own.asked
    _left = threads
    torch.set_num_threads(threads)
