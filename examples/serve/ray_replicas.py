"""Several servers behind one address with Ray Serve: prompts that begin alike go to the replica that has read them.

    pip install 'kvsieve[ray]'
    python examples/serve/ray_replicas.py [MODEL] [--replicas 2] [--method snapkv] [--budget 20%] [--port 8000]
    python examples/serve/ray_replicas.py --try        # asks itself a few questions and ends

Every replica is the server of `kvsieve serve` with a store in its own memory. A front door looks at the beginning of
each request's prompt and names it (Ray's model multiplexing, with beginnings in the place of models), so that the
next request with the same beginning goes to the replica that has it in its store, unless that one is busy.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import serve

import kvsieve
from kvsieve.serve.bodies import Bodies
from kvsieve.serve.failures import Failure
from kvsieve.serve.guards import json_error
from kvsieve.serve.keys import read_keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application

# Characters of a prompt by which requests are kept together, and beginnings that a replica is known by.
BEGINNING, KNOWN = 2000, 256


@serve.deployment(max_ongoing_requests=64)
class Replica:
    """The server, asked by the front door."""

    def __init__(self, model: str | None, method: str, budget: str | None, threads: int | None) -> None:
        import torch

        torch.set_num_threads(threads or max((os.cpu_count() or 2) // 2, 1))
        loaded, tokenizer = kvsieve.models.load(model)
        plan = kvsieve.plan(method, **({} if budget is None else {"budget": budget}))
        options = ServerOptions(plan, method, budget, ("full",), keys=read_keys(None))
        options.keys.check()
        self._stack = contextlib.ExitStack()
        self._app = self._stack.enter_context(application(loaded, tokenizer, options, model or "demo"))

    @serve.multiplexed(max_num_models_per_replica=KNOWN)
    async def known(self, beginning: str) -> str:
        """Let the router know that prompts which begin so are read here."""
        return beginning

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Yield status and headers, then the pieces of the body."""
        if beginning := serve.get_multiplexed_model_id():
            await self.known(beginning)
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        asked, gone = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not asked.is_set():
                asked.set()
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**scope, "app": self._app}, receive, sent.put)
            finally:
                await sent.put(None)

        running = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    who = (b"x-replica", serve.get_replica_context().replica_id.unique_id.encode())
                    yield message["status"], [*message["headers"], who]
                else:
                    yield message.get("body", b"")
        finally:
            gone.set()
            running.cancel()

    def __del__(self) -> None:
        self._stack.close()


def beginning_of(owner: str, body: bytes) -> str:
    """Name a request's beginning: of its key, and the first characters of its messages or prompt; "" for none."""
    try:
        asked = json.loads(body)
        said = asked.get("messages") or asked.get("prompt")
    except (ValueError, AttributeError):
        return ""
    if not said:
        return ""
    text = json.dumps(said)[:BEGINNING]
    return hashlib.sha256(f"{owner}\n{text}".encode()).hexdigest()[:32]


door = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.deployment(max_ongoing_requests=256)
@serve.ingress(door)
class Front:
    """Passes requests on to the replica that knows their beginning."""

    def __init__(self, replicas: Any) -> None:
        self._replicas, self._bodies = replicas, Bodies(ServerLimits())

    @door.api_route("/{path:path}", methods=["GET", "POST"])
    async def passed_on(self, request: Request) -> Response:
        try:
            async with self._bodies.read(request) as body:
                return await self._answered(request, body)
        except Failure as failure:
            return json_error(failure, request.url.path)

    async def _answered(self, request: Request, body: bytes) -> Response:
        kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
        scope = {name: request.scope[name] for name in kept if name in request.scope}
        scope |= {"path": request.url.path, "root_path": "", "asgi": {"version": "3.0"}}
        key = beginning_of(request.headers.get("authorization", ""), body)
        handle = self._replicas.options(stream=True, multiplexed_model_id=key)
        parts = handle.answer.remote(scope, body)
        status, headers = await anext(aiter(parts))

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for part in parts:
                    yield part
            finally:
                # The client may have gone away.
                parts.cancel()

        out = StreamingResponse(pieces(), status)
        out.raw_headers = [pair for pair in headers if pair[0] != b"content-length"]
        return out


def built(given: argparse.Namespace) -> Any:
    """The deployments, joined."""
    replicas = Replica.options(num_replicas=given.replicas, ray_actor_options={"num_cpus": given.cpus}).bind(
        given.model, given.method, given.budget, given.threads
    )
    return Front.bind(replicas)


def trial(url: str, name: str) -> None:
    """Ask several questions on several documents, and tell which replica answered and what it had read before."""
    places: dict[int, set[str]] = {}
    for turn in range(3):
        for document in range(4):
            text = " ".join(f"Item {number} of list {document} is {number * 37 % 101}." for number in range(140))
            body = {
                "model": name,
                "messages": [{"role": "user", "content": f"{text} Question {turn}: which item is the largest?"}],
                "max_tokens": 8,
                "kv": {"method": "full"},
            }
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            reply.raise_for_status()
            usage = reply.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            who = reply.headers["x-replica"]
            places.setdefault(document, set()).add(who)
            print(f"document {document}, question {turn}: replica {who}, {cached} of {usage['prompt_tokens']} from it")
            assert (cached > 1000) == (turn > 0)
    assert all(len(each) == 1 for each in places.values()), places
    body = {"model": name, "prompt": "Once", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 4
    missing = httpx.post(f"{url}/v1/chat/completions", json={"model": "none", "messages": []}, timeout=60)
    assert missing.status_code == 400
    print(f"{len(set.union(*places.values()))} replicas have answered; a stream and an error passed through")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--method", default="full")
    parser.add_argument("--budget")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cpus", type=float, default=1.0, help="that Ray counts for a replica")
    parser.add_argument("--threads", type=int, help="of a replica; half of the machine's if left out")
    parser.add_argument("--try", dest="tried", action="store_true", help="ask it a few questions, and end")
    given = parser.parse_args()
    import ray

    ray.init(include_dashboard=False, num_cpus=max(os.cpu_count() or 1, given.replicas + 1), log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    serve.run(built(given), name="kvsieve", route_prefix="/", blocking=not given.tried)
    if given.tried:
        try:
            trial(f"http://127.0.0.1:{given.port}", given.model or "demo")
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
