"""Undo of a failed call on a cache, or refusal of the cache."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache

# The current call of each cache, by the cache's id: its thread and token.
_CALLS: dict[int, tuple[int, object]] = {}


@contextlib.contextmanager
def _alone(cache: SieveCache) -> Iterator[None]:
    """Lock a cache for calls of one thread. Raises CacheStateError if another thread uses it."""
    number = id(cache)
    call = (threading.get_ident(), object())
    # Twice, because an interrupt may come within the final steps.
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
    """Restore a cache after a call that fails or is interrupted, or refuse it from then on.

    It is restored if nothing was fed to it; otherwise its content is unknown to the caller, and only a rollback to a
    snapshot makes it usable again. Under a plan that prefills the whole conversation in every turn it is emptied.
    Meanwhile a call of another thread is refused.

    Args:
        cache: of the call; objects other than a SieveCache are ignored.
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
                # Every turn of such a plan prefills the whole conversation into an empty cache.
                cache.reset()
                cache.conversation.ends = before.ends
            raise
