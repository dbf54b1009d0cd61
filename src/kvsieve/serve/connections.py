"""Connections of clients: bounded in number, and closed if no request arrives or no reply is read."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Key in a request's scope of the function that closes its connection without a reply.
ABORT = "kvsieve.abort"


class _BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol with the bounds of `bounded_connections`."""

    most: int
    patience: float
    reading: float
    waiting: dict[Any, None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        application = self.app

        async def abortable(scope: Scope, receive: Receive, send: Send) -> None:
            await application({**scope, ABORT: self.transport.abort}, receive, send)

        self.app: ASGIApp = abortable
        self._head: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            next(iter(self.waiting), self).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = self.loop.call_later(self.reading, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None:
            self._reader.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()
        if self._reader is not None:
            self._reader.cancel()

    def _watch(self) -> None:
        """Start the client's time for a request when none is being answered, whatever it sends meanwhile."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self not in self.waiting and self in self.connections:
            self.waiting[self] = None
            self._head = self.loop.call_later(self.patience, self.transport.close)

    def _unwatch(self) -> None:
        self.waiting.pop(self, None)
        if self._head is not None:
            self._head.cancel()


def bounded_connections(most: int, patience: float = 10.0, reading: float = 60.0) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol of a connection with bounds.

    Args:
        most: connections at once. A further one closes the one that has waited longest for a request.
        patience: seconds from a connection, or from the end of a reply, to the complete head of a request.
        reading: seconds that a client may pause reading a reply.
    """
    bounds = {"most": most, "patience": patience, "reading": reading, "waiting": {}}
    return type("BoundedConnection", (_BoundedConnection,), bounds)
