"""The thread in which a streamed answer is generated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import TypeVar

import torch

_Made = TypeVar("_Made")
_T = TypeVar("_T")


class Stopped(BaseException):
    """Ends a turn whose stream was closed."""


class Worker(threading.Thread):
    """The thread of a stream.

    Thread.join and is_alive alone are not safe under interrupts: an interrupted join takes the thread for ended, and an
    interrupted start for not begun.

    left: not empty once the generator has ended, or was left.
    """

    def __init__(self, work: Callable[[], None], left: SimpleQueue[None]) -> None:
        super().__init__(name="kvsieve-chat", daemon=True)
        self._work = work
        self._left = left
        self._begun = self._over = False
        self._end: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        self._begun = True
        try:
            # Work that begins after the generator was left does nothing.
            if self._left.empty():
                self._work()
        finally:
            del self._work
            self._over = True
            self._end.put(None)

    def wait(self) -> None:
        """Return once the work has ended, in any case; an interrupt meanwhile is raised after that."""
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


def streamed(
    alone: Callable[[Callable[[], None]], None],
    answer: Callable[[Callable[[str], None], Callable[[], None]], _Made],
    take: Callable[[_Made], _T],
) -> Generator[str, None, _T]:
    """Yield the pieces of an answer from a thread, and return the result of `take`.

    Args:
        alone: does the work while the chat is locked.
        answer: passes pieces to its first argument, and calls the second where the turn may end.
        take: called with the answer once it is complete.
    """
    said: SimpleQueue[str | tuple[_Made] | BaseException] = SimpleQueue()
    left: SimpleQueue[None] = SimpleQueue()
    inference = torch.is_inference_mode_enabled()

    def check() -> None:
        if not left.empty():
            raise Stopped

    def turn() -> None:
        said.put((answer(said.put, check),))
        # The turn is this thread's until the generator has taken it over, or was left.
        left.get()

    def work() -> None:
        try:
            with torch.inference_mode(inference):
                alone(turn)
        except BaseException as error:
            # Where nobody listens any more, it would keep all that the turn has made.
            if left.empty():
                said.put(error)

    worker = Worker(work, left)
    # Twice, because an interrupt may come within the final steps.
    try:
        try:
            worker.start()
            while isinstance(part := said.get(), str):
                yield part
            if isinstance(part, BaseException):
                try:
                    raise part
                finally:
                    del part
            return take(part[0])
        finally:
            left.put(None)
            worker.wait()
    finally:
        left.put(None)
        worker.wait()
