"""Undoing on a cache what a call did that failed half-way, or refusing the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvsieve.hf.cache.cache import SieveCache


@contextlib.contextmanager
def undone_on_failure(cache: Any) -> Iterator[None]:
    """Leave a cache as it was before a call that fails, an interrupt included, or refuse it from then on.

    It is as it was where nothing was fed to it; else it holds what its caller does not know of, and only a rollback to
    a snapshot makes it usable again. Under a plan that reads the whole conversation in every turn it is emptied.

    Args:
        cache: of the call; anything but a SieveCache is left alone.
    """
    if not isinstance(cache, SieveCache) or cache.status != "ready":
        yield
        return
    before = cache.conversation.copy()
    try:
        yield
    except BaseException:
        conversation, status = cache.conversation, cache.status
        cache.status = "broken"
        if status == "ready" and (conversation.num_seen, conversation.batch) == (before.num_seen, before.batch):
            cache.conversation, cache.status = before, "ready"
        elif cache.owner.plan.shortens_prompt:
            # Every turn of such a plan reads the whole conversation into an empty cache.
            cache.reset()
            cache.conversation.ends = before.ends
        raise
