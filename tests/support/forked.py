"""A child of the test's own process: it need not import again what the test has, which takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch


@contextlib.contextmanager
def forked(act: Callable[..., Any], *given: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Call `act(tell, *given)` in a child; returns it, and where what it tells is received. It is killed at the end."""
    context = multiprocessing.get_context("fork")
    heard, telling = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(act, telling, given))
    child.start()
    telling.close()
    try:
        yield child, heard
    finally:
        child.kill()
        child.join()
        heard.close()


def _run(act: Callable[..., Any], telling: Connection, given: tuple[Any, ...]) -> None:
    # The parent's threads are not the child's.
    torch.set_num_threads(1)
    act(telling.send, *given)


def all_told(heard: Connection) -> list[Any]:
    """Return all that a child tells until its end."""
    told = []
    with contextlib.suppress(EOFError):
        while True:
            told.append(heard.recv())
    return told
