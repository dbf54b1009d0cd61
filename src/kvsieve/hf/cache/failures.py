"""Undoing on a cache what a call did that failed half-way, or refusing the cache."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache

# The call that each cache is in, by the cache's id: its thread, and what it is known by.
_CALLS: dict[int, tuple[int, object]] = {}


@contextlib.contextmanager
def _alone(cache: SieveCache) -> Iterator[None]:
    """Let calls of one thread at a time use a cache. Raises CacheStateError where another thread's does."""
    number = id(cache)
    call = (threading.get_ident(), object())
    # Twice, because an interrupt may come within what is done at the end.
    try:
        try:
            # One step, so that of two threads only one gets the cache.
            if _CALLS.setdefault(number, call)[0] != call[0]:
                raise CacheStateError(
                    "a call of another thread is using this cache: give each thread a cache of its own, such as "
                    "cache.fork(), or wait for that call"
                )
            yield
        finally:
            if _CALLS.get(number) is call:
                del _CALLS[number]
    finally:
        if _CALLS.get(number) is call:
            del _CALLS[number]


@contextlib.contextmanager
def undone_on_failure(cache: Any) -> Iterator[None]:
    """Leave a cache as it was before a call that fails, an interrupt included, or refuse it from then on.

    It is as it was where nothing was fed to it; else it holds what its caller does not know of, and only a rollback to
    a snapshot makes it usable again. Under a plan that reads the whole conversation in every turn it is emptied.
    A call of another thread on it is refused meanwhile.

    Args:
        cache: of the call; anything but a SieveCache is left alone.
    """
    if not isinstance(cache, SieveCache):
        yield
        return
    with _alone(cache):
        if cache.status != "ready":
            yield
            return
        before = cache.conversation.copy()
        try:
            yield
        except BaseException:
            conversation = cache.conversation
            status = cache.status
            cache.status = "broken"
            if status == "ready" and (conversation.num_seen, conversation.batch) == (before.num_seen, before.batch):
                cache.conversation = before
                cache.status = "ready"
            elif cache.owner.plan.shortens_prompt:
                # Every turn of such a plan reads the whole conversation into an empty cache.
                cache.reset()
                cache.conversation.ends = before.ends
            raise
