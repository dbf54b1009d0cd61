"""Calls of a composite model that end before its decoder, whose arguments are kept: images embedded among tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from kvsieve.hf.forward.request import StopForward

_WANTED: ContextVar[dict[str, Any] | None] = ContextVar("kvsieve_embedding", default=None)


@contextlib.contextmanager
def ending_before_decoder() -> Iterator[dict[str, Any]]:
    """Yield a dict for the arguments of the decoder; a call of the model in the block ends before its decoder runs."""
    wanted: dict[str, Any] = {}
    token = _WANTED.set(wanted)
    try:
        with contextlib.suppress(StopForward):
            yield wanted
    finally:
        _WANTED.reset(token)


def end_if_embedding(arguments: Mapping[str, Any]) -> None:
    """End the call of the model if only the decoder's arguments are wanted."""
    wanted = _WANTED.get()
    if wanted is not None:
        wanted.update(arguments)
        raise StopForward
