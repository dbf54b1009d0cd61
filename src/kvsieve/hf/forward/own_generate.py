"""Passes within the model's own generate on an attached model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from kvsieve.hf.cache.cache import SieveCache

_NOTED: ContextVar[list[SieveCache] | None] = ContextVar("kvsieve_caches", default=None)


@contextlib.contextmanager
def noting_caches() -> Iterator[list[SieveCache]]:
    """Record the cache of generate's passes in this block; the last one only."""
    caches: list[SieveCache] = []
    token = _NOTED.set(caches)
    try:
        yield caches
    finally:
        _NOTED.reset(token)


def in_generate() -> bool:
    """Return True within the model's own generate."""
    return _NOTED.get() is not None


def note_cache(cache: SieveCache) -> None:
    """Record a pass's cache for `noting_caches`."""
    noted = _NOTED.get()
    if noted is not None:
        noted[:] = [cache]
