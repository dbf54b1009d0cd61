"""Signals that end the server: running answers get their time, and the store is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

# The end of a terminal or of an ssh session; Windows has none.
_HANGUPS = tuple(kind for kind in signal.Signals if kind.name == "SIGHUP")
_KINDS = (signal.SIGTERM, signal.SIGINT, *_HANGUPS)


@contextlib.contextmanager
def ended_by_signals(say: Callable[[str], None]) -> Iterator[None]:
    """Leave the block at SIGTERM and SIGHUP by SystemExit(0); after it both are ignored.

    uvicorn handles SIGTERM and SIGINT first, and raises them again once all replies are sent: by default that ends the
    process before the store is written. A SIGHUP that is ignored, as under nohup, stays so.

    Args:
        say: gets a line if a Ctrl-C after the block is ignored. A second one interrupts.
    """

    def leave(*_: object) -> None:
        raise SystemExit(0)

    def terminate(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    def warn(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("the store is being written; Ctrl-C once more leaves the rest of it unwritten")

    hangups = [kind for kind in _HANGUPS if signal.getsignal(kind) == signal.SIG_DFL]
    if _in_main_thread():
        signal.signal(signal.SIGTERM, leave)
        for kind in hangups:
            signal.signal(kind, terminate)
    try:
        yield
    finally:
        if _in_main_thread():
            for kind in (signal.SIGTERM, *hangups):
                signal.signal(kind, signal.SIG_IGN)
            if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
                signal.signal(signal.SIGINT, warn)


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the handlers of signals after the block."""
    before = {kind: signal.getsignal(kind) for kind in _KINDS}
    try:
        yield
    finally:
        if _in_main_thread():
            for kind, handler in before.items():
                signal.signal(kind, handler)


def _in_main_thread() -> bool:
    # Others cannot handle signals.
    return threading.current_thread() is threading.main_thread()
