"""The thread in which a streamed answer is generated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Stopped(BaseException):
    """Ends a turn whose stream was closed."""


class Worker(threading.Thread):
    """The thread of a stream.

    Thread.join and is_alive alone are of no use to who may be interrupted: a join that is interrupted takes the thread
    for ended, and a start for not begun.

    left: not empty once the generator has ended, or was left.
    """

    def __init__(self, work: Callable[[], None], left: SimpleQueue[None]) -> None:
        super().__init__(name="kvsieve-chat", daemon=True)
        self._work, self._left = work, left
        self._begun = self._over = False
        self._end: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        self._begun = True
        try:
            # What begins after the generator was left does nothing.
            if self._left.empty():
                self._work()
        finally:
            del self._work
            self._over = True
            self._end.put(None)

    def wait(self) -> None:
        """Return once the work has ended, whatever comes; an interrupt meanwhile is raised after that."""
        interrupt = None
        while self._begun and not self._over:
            try:
                self._end.get()
            except KeyboardInterrupt as error:
                interrupt = error
        if self.is_alive():
            self.join()
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                # Or it and this call would keep each other, and all that led here.
                interrupt = None
