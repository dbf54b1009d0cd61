"""Background thread that writes nodes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvsieve.errors import CacheFileError
from kvsieve.store.node import Node

_log = logging.getLogger(__name__)


class Writer:
    """Writes nodes one by one in its own thread."""

    def __init__(self, write: Callable[[Node], None]) -> None:
        """See the class. write: writes one node; raises CacheFileError on failure."""
        self._write = write
        self._changed = threading.Condition()
        self._waiting: deque[Node] = deque()
        self._failed: list[Node] = []
        self._busy = self._closed = False
        self.written = self.errors = 0
        self._thread = threading.Thread(target=self._run, name="kvsieve-store", daemon=True)
        self._thread.start()

    def put(self, node: Node) -> None:
        """Queue a node."""
        with self._changed:
            self._waiting.append(node)
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Number of unwritten nodes, including failed ones."""
        with self._changed:
            return len(self._waiting) + len(self._failed) + self._busy

    def flush(self) -> bool:
        """Wait until all are written, retrying failed ones; return False if some still fail."""
        with self._changed:
            self._waiting.extend(self._failed)
            self._failed.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._busy)
            return not self._failed

    def close(self) -> None:
        """Write the remaining nodes and end the thread."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                node = self._waiting.popleft()
                self._busy = True
            try:
                self._write(node)
                failed = False
            except Exception as error:
                failed = True
                level = logging.WARNING if isinstance(error, (CacheFileError, OSError)) else logging.ERROR
                _log.log(level, "a node of the store stays in memory only: %s", error)
            with self._changed:
                self._busy = False
                self.errors += failed
                self.written += not failed
                if failed:
                    self._failed.append(node)
                self._changed.notify_all()
