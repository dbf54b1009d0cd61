"""Stored responses, in memory: by owner and id, for a time, bounded in number and bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

# Bytes that a text costs besides its own.
_OVERHEAD = 100


@dataclass(frozen=True)
class KeptResponse:
    """A stored response; texts are JSON.

    Attributes:
        reply: the response object.
        inputs: items of its request.
        conversation: all items up to its end, its output included.
        chain: name of the responses that continue each other, this one included.
        documents: its prompt had documents, which are not stored.
    """

    reply: bytes
    inputs: tuple[bytes, ...]
    conversation: tuple[bytes, ...]
    chain: str = ""
    documents: bool = False


def size_of(texts: Collection[bytes]) -> int:
    """Return the bytes of memory that texts take."""
    return sum(len(text) + _OVERHEAD for text in texts)


@dataclass(frozen=True)
class _KeptEntry:
    """A response, its bytes, and the time when it expires. Items that conversations share are counted in each."""

    response: KeptResponse
    size: int
    end: float


class KeptResponses:
    """Responses of all owners. The owner with the largest share loses its oldest ones first.

    Attributes:
        largest: most bytes of one conversation, so that it does not displace all others.

    Args:
        seconds: time to live.
        number: most responses.
        size: most bytes.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float = 3600.0,
        number: int = 4096,
        size: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.largest = size // 4
        self._seconds = seconds
        self._number = number
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        # By owner and id, oldest first, and bytes by owner.
        self._entries: dict[str, dict[str, _KeptEntry]] = {}
        self._sizes: dict[str, int] = {}

    def put(self, owner: str, name: str, response: KeptResponse) -> None:
        """Store a response. name: its id."""
        entry = _KeptEntry(response, size_of((response.reply, *response.conversation)), self._clock() + self._seconds)
        with self._lock:
            self._entries.setdefault(owner, {})[name] = entry
            self._sizes[owner] = self._sizes.get(owner, 0) + entry.size
            self._remove_expired()
            while self._share(self._entries) > 1:
                largest = max(self._entries, key=lambda one: self._share([one]))
                self._remove(largest, next(iter(self._entries[largest])))

    def get(self, owner: str, name: str) -> KeptResponse | None:
        """Return a response of an owner; None if it is unknown, expired, removed, or another owner's."""
        with self._lock:
            self._remove_expired()
            entry = self._entries.get(owner, {}).get(name)
            return None if entry is None else entry.response

    def drop(self, owner: str, name: str) -> bool:
        """Remove a response; return False if the owner has none of that id."""
        with self._lock:
            self._remove_expired()
            known = name in self._entries.get(owner, {})
            if known:
                self._remove(owner, name)
            return known

    def _share(self, owners: Collection[str]) -> float:
        """Return the share that responses of some owners take of the limit that they are nearer to."""
        number = sum(len(self._entries[owner]) for owner in owners)
        size = sum(self._sizes[owner] for owner in owners)
        return max(number / self._number, size / self._size)

    def _remove_expired(self) -> None:
        now = self._clock()
        for owner in list(self._entries):
            for name, entry in list(self._entries[owner].items()):
                if entry.end > now:
                    break
                self._remove(owner, name)

    def _remove(self, owner: str, name: str) -> None:
        self._sizes[owner] -= self._entries[owner].pop(name).size
        if not self._entries[owner]:
            del self._entries[owner], self._sizes[owner]
