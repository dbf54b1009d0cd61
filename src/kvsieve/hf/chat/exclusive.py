"""State and cache of a chat, which one call at a time may use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.copies import Forked
from kvsieve.hf.chat.state import ChatState, Transcript

_T = TypeVar("_T")


class ExclusiveState(Forked):
    """Base of a chat: its state, its cache, and the lock of a turn in progress."""

    # Identifies a turn in progress; an attribute of the instance only then.
    _turn: object | None = None

    def __init__(self, cache: SieveCache, transcript: Transcript) -> None:
        self._cache = cache
        self._state = ChatState(transcript, cache.snapshot())
        # The cache agrees with `_state` where it is `_at` it, and else is put right.
        self._at: ChatState | None = self._state

    @property
    def cache(self) -> SieveCache:
        """The conversation's cache."""
        if self._at is not self._state and self._turn is None:
            self._alone(lambda: None)
        return self._cache

    @property
    def _transcript(self) -> Transcript:
        # Not the state: its cache would live as long as a traceback.
        return self._state.transcript

    def _alone(self, work: Callable[[], _T]) -> _T:
        """Do `work` with exclusive use of the chat, and a cache that agrees with `_state`.

        An interrupt at any point leaves the chat unlocked, and a cache that the next call restores.
        """
        lock = object()
        # Twice, because an interrupt may come within the final steps.
        try:
            try:
                if vars(self).setdefault("_turn", lock) is not lock:
                    raise CacheStateError("a turn of this chat is in progress: let it end, or close its stream")
                self._settle()
                return work()
            finally:
                if self._turn is lock:
                    self._settle()
                    del self._turn
        finally:
            if self._turn is lock:
                del self._turn

    def _settle(self) -> None:
        """Restore the cache after a failed turn."""
        state = self._state
        if self._at is not state:
            self._cache.rollback(state.cache)
            self._at = state
