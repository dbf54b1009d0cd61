"""Bodies of requests, bounded while they arrive, before parsing."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from itertools import accumulate

from fastapi import Request
from starlette.requests import ClientDisconnect

from kvsieve.serve.failures import Failure
from kvsieve.serve.limits import ServerLimits

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEPS)
# As values, where others write them.
_NO_NUMBER = re.compile(rb"(?<![^\s:,\[])-?(NaN|Infinity)(?![^\s,\]}])")
# Bytes examined at a time.
_PIECE = 1 << 16

# Most values of a body (a token id is one), members, lists plus objects, and levels of nesting.
MOST_VALUES = 1_000_000
MOST_MEMBERS = 50_000
DEEPEST = 64


class JsonShape:
    """Counts values, members and nesting of a JSON text in its bytes as they arrive.

    Parsed, a value of two bytes takes forty, and a member of six takes hundreds.
    """

    def __init__(self) -> None:
        self.values = self.members = self.depth = 0
        self._escaped = False
        # 1 inside of a string.
        self._inside = 0

    def add(self, data: bytes) -> None:
        """Count more bytes. Raises Failure for more than a request needs."""
        for begin in range(0, len(data), _PIECE):
            self._add(data[begin : begin + _PIECE])

    def _add(self, data: bytes) -> None:
        # A parser stops at the first backslash outside of strings, so the count after it does not matter.
        data = data[1:] if self._escaped else data
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
        self._escaped = data.endswith(b"\\")
        parts = data.split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        self._inside = (self._inside + len(parts) - 1) % 2
        if found := _NO_NUMBER.search(outside):
            raise Failure(400, f"{found[0].decode()} is no number in JSON; leave it out, or send null")
        brackets = outside.translate(None, _NO_BRACKETS)
        depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self.depth))
        self.depth = depths[-1]
        opened = brackets.count(b"[") + brackets.count(b"{")
        self.values += outside.count(b",") + opened
        self.members += outside.count(b":") + opened
        if max(depths) > DEEPEST:
            raise Failure(400, f"the body nests lists and objects more than {DEEPEST} deep; send less deep ones")
        if self.values > MOST_VALUES or self.members > MOST_MEMBERS:
            raise Failure(
                413,
                f"the body has more than {MOST_VALUES:,} values, or more than {MOST_MEMBERS:,} members, lists and "
                "objects; send less",
                code="request_too_large",
            )


class Bodies:
    """Reads the bodies of requests, within a server's limits and a request's time."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yield a request's body; inside the block its bytes count towards the total of all requests.

        Raises:
            Failure: it is too long, too late, too much with all others, or cut off.
        """
        got = bytearray()
        most = self.limits.body_bytes
        declared = request.headers.get("content-length", "").lstrip("0")
        too_long = Failure(413, f"the body is longer than {most} bytes; send less", code="request_too_large")
        if len(declared) > 18 or (declared.isdecimal() and int(declared) > most):
            raise too_long
        shape = JsonShape()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for piece in request.stream():
                    got += piece
                    self._held += len(piece)
                    if len(got) > most:
                        raise too_long
                    if self._held > self.limits.uploads * most:
                        raise Failure(503, "the bodies of other requests take all memory that there is", retry=5)
                    shape.add(piece)
            yield bytes(got)
        except TimeoutError:
            message = f"the body was not complete after {self.limits.seconds:g} s; send it faster, or send less"
            raise Failure(408, message) from None
        except ClientDisconnect:
            raise Failure(400, "the body ended before it was complete") from None
        finally:
            self._held -= len(got)
