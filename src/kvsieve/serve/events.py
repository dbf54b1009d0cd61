"""Streamed replies as server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

# Seconds of silence after which a comment is sent, so that no proxy closes the connection.
_SILENCE = 15.0
# Line breaks of Unicode, which some clients end a line at; in JSON they are in texts only.
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}


async def left(receive: Receive) -> None:
    """Return when the client has disconnected; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: str, name: str | None = None) -> str:
    """Write a server-sent event. data: JSON without line breaks, or a word."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data.translate(_ESCAPES)}\n\n"


class EventStream(StreamingResponse):
    """A reply of server-sent events, each an item of an iterator, as `event` writes it.

    The iterator is closed as soon as the client disconnects, also between two items.
    """

    media_type = "text/event-stream"

    def __init__(self, data: AsyncGenerator[str, None]) -> None:
        super().__init__(data, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        leaving = asyncio.ensure_future(left(receive))
        item = None
        try:
            while True:
                item = asyncio.ensure_future(anext(self._data, None))
                while not item.done() and not leaving.done():
                    await asyncio.wait({item, leaving}, timeout=_SILENCE, return_when=asyncio.FIRST_COMPLETED)
                    if not item.done() and not leaving.done():
                        await write(": still here\n\n")
                if leaving.done():
                    return
                if (data := item.result()) is None:
                    return await write("", more=False)
                await write(data)
        finally:
            for task in (leaving, item):
                if task is not None:
                    task.cancel()
                    await asyncio.wait({task})
            await self._data.aclose()
