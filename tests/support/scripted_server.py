"""A server of the chat page whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvsieve.serve.page import add_page

# A piece of text; members of a chunk; an event that is waited for; an error.
Step = str | dict[str, Any] | threading.Event | Exception
CONTEXT = 200


def usage(prompt: int, made: int, **kv: Any) -> dict[str, Any]:
    """Return the last chunk's members: what an answer cost."""
    told = {"method": "full", "applied": True, "entries": prompt, "prompt_tokens": prompt, "share": 1.0, "bytes": 4096}
    told |= {"notes": [], "ttft_s": 0.5, "seconds": 1.5, "map": [1.0, 1.0, 0.5], **kv}
    out = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return {"choices": [], "usage": {**out, "prompt_tokens_details": {"cached_tokens": 3}, "kv": told}}


class ScriptedServer:
    """The page, and a server that keeps what it is asked.

    Attributes:
        app: the application.
        asked: bodies of requests for answers, in order.
        script: returns the steps of an answer to a body.
        methods: that requests may name.
        open: the list of methods is sent once it is set.
        key: that requests need, None for none.
        new_tokens: generated so far; ten more at each look.
    """

    def __init__(self) -> None:
        self.app, self.asked, self.open = FastAPI(), list[dict[str, Any]](), threading.Event()
        self.script: Callable[[dict[str, Any]], Sequence[Step]] = lambda body: ["Yes."]
        self.methods, self.key = ["full", "rocketkv-mt", "snapkv"], None
        self.new_tokens = 5
        self.open.set()
        add_page(self.app)
        self._add_views()
        self._add_answers()

    def _refused(self, request: Request) -> JSONResponse | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "an API key is needed"}}, 401)

    def _add_views(self) -> None:
        @self.app.get("/v1/models")
        async def models(request: Request) -> Any:
            return self._refused(request) or JSONResponse({"data": [{"id": "tiny"}]})

        @self.app.get("/v1/kv")
        async def kv(request: Request) -> Any:
            await asyncio.to_thread(self.open.wait, 60)
            self.new_tokens += 10
            state = {"running": 1, "reading": 1, "queued": 2, "kv_bytes": 1 << 20, "kv_limit": 1 << 22}
            node = {"key": "abcdefghij", "session": None, "tokens": 64, "plan": "full", "hits": 2}
            counts = {"answered": 7, "new_tokens": self.new_tokens}
            told = {"state": state, "counts": counts, "store": {"hits": 2, "memory_bytes": 2048}}
            told |= {"nodes": [{**node, "memory_bytes": 2048, "disk_bytes": 0}], "plan": self.methods[0]}
            told |= {"methods": self.methods, "context": CONTEXT, "max_tokens": 64}
            return self._refused(request) or JSONResponse(told)

        @self.app.post("/tokenize")
        async def tokenize(request: Request) -> Any:
            return self._refused(request) or {"count": len((await request.json())["prompt"].split())}

    def _add_answers(self) -> None:
        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            self.asked.append(body)
            return self._refused(request) or StreamingResponse(
                _events(self.script(body)), media_type="text/event-stream"
            )


async def _events(steps: Sequence[Step]) -> AsyncIterator[str]:
    for step in steps:
        if isinstance(step, threading.Event):
            await asyncio.to_thread(step.wait, 60)
        elif isinstance(step, Exception):
            yield _event({"error": {"message": str(step)}})
            break
        elif isinstance(step, str):
            yield _event({"choices": [{"index": 0, "delta": {"content": step}, "finish_reason": None}]})
        else:
            yield _event({"choices": [], **step})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
