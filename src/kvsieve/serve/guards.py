"""Guards before the endpoints: host names, concurrent requests, and replies before a body has arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvsieve.serve.connections import ABORT
from kvsieve.serve.events import left
from kvsieve.serve.failures import Failure

# Seconds for a client to send the rest of an ignored body before the answer, and for its pauses.
_LONGEST = 10.0
_PAUSE = 2.0
_ALWAYS = ("/health", "/metrics")


class Edge:
    """Refuses requests for other host names or beyond the limit on concurrent ones; answers HEAD as GET.

    Args:
        app: the application.
        most: requests at once; /health and /metrics are always answered.
        hosts: allowed names in the Host header, none for any.
    """

    def __init__(self, app: ASGIApp, most: int, hosts: Sequence[str] = ()) -> None:
        self.app = app
        self.most = most
        self.hosts = {host_name(host) for host in hosts}
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The protocol below sends no body where the client's own request is a HEAD.
            scope = {**scope, "method": "GET"}
        upload = _Upload(scope, receive, send)
        failure = self._failure(scope)
        if failure is not None:
            await json_error(failure, scope["path"])(scope, upload.receive, upload.send)
            return
        self._running += 1
        try:
            await self.app(scope, upload.receive, upload.send)
        finally:
            self._running -= 1

    def _failure(self, scope: Scope) -> Failure | None:
        host = Headers(scope=scope).get("host", "")
        if self.hosts and host_name(host) not in self.hosts:
            message = f"this server is not called {host[:100]!r}; start it with --allow-host to let it be"
            return Failure(400, message, code="unknown_host")
        if self._running >= self.most and scope["path"] not in _ALWAYS:
            return Failure(503, f"{self._running} requests are answered already; try again later", retry=5)
        return None


def host_name(header: str) -> str:
    """Return the name in a Host header without its port: lower case, no final dot, no brackets."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.rstrip(".")


class _Upload:
    """A request's body in transit: a reply before its end waits briefly for the rest, then closes the connection.

    A client that is still sending would otherwise lose the reply with the connection, or keep the connection forever.
    One that stops within its body reads no reply either and loses the connection, as with nginx.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._receive = receive
        self._send = send
        self._open = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        # Such a client waits for 100-continue before sending, and does not get it for an ignored body.
        self._asks = headers.get("expect", "").lower() == "100-continue"
        self._abort: Callable[[], None] | None = scope.get(ABORT)
        self._begun = False

    async def receive(self) -> Message:
        self._asks = False
        message = await self._receive()
        self._open = self._open and message["type"] == "http.request" and message.get("more_body", False)
        self._begun = self._begun or bool(message.get("body"))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._open:
            stopped = not self._asks and await self._rest_stops()
            if stopped and self._begun and self._abort is not None:
                self._abort()
                await left(self._receive)
            elif self._open:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self._send(message)

    async def _rest_stops(self) -> bool:
        """Receive the rest for a while; return True if it stops before its end."""
        end = time.monotonic() + _LONGEST
        while self._open and time.monotonic() < end:
            try:
                await asyncio.wait_for(self.receive(), _PAUSE)
            except TimeoutError:
                return True
        return False


def json_error(failure: Failure, path: str) -> Any:
    """Return the reply for an error of a request, in the protocol of its path."""
    return JSONResponse(failure.body_for(path), failure.status, failure.headers)
