"""The state of a cache at one moment."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from kvsieve.hf.cache.copies import Unpicklable
from kvsieve.hf.cache.owner import Owner
from kvsieve.hf.cache.records import Conversation
from kvsieve.hf.cache.states import CacheLayer


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot(Unpicklable):
    """A conversation at one moment; see SieveCache.snapshot. Shares the buffers of the cache at that time.

    Attributes:
        cache: the source.
        owner: its model and plan.
        conversation: its state.
        layers: copies of the cache's layers.
    """

    cache: weakref.ref[Any]
    owner: Owner
    conversation: Conversation
    layers: list[CacheLayer]

    _instead = "save the cache with sieve.save(cache, path) after a rollback to it"
