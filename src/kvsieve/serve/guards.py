"""Guards before the endpoints: bounded bodies, and a Host header that is this server's."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvsieve.serve.failures import Failure


class BoundedBodies:
    """Refuses bodies of more than so many bytes, told or not."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        # Read whole before anything looks at it: a body that grows too long is answered as one that says so.
        got, more = bytearray(), not told.isdigit() or int(told) <= self.most
        too_long = not more
        while more:
            message = await receive()
            got += message.get("body", b"")
            too_long = len(got) > self.most
            more = message["type"] == "http.request" and message.get("more_body", False) and not too_long
        if too_long:
            failure = Failure(413, f"the body is longer than {self.most} bytes; send less", code="request_too_large")
            await JSONResponse(failure.body, failure.status)(scope, receive, send)
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(got), "more_body": False}

        await self.app(scope, again, send)


def json_error(failure: Failure) -> Any:
    """Return the response that tells of a failure."""
    return JSONResponse(failure.body, failure.status, failure.headers)
