"""Dependencies of endpoints, bodies of requests, and replies, complete or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import ValidationError

from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.events import EventStream, event, left
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.failures import Failure, failure_of
from kvsieve.serve.keys import Keys
from kvsieve.serve.metrics import Metrics
from kvsieve.serve.prepare import Preparer
from kvsieve.serve.replies import json_text
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.schema import Strict
from kvsieve.serve.ticket import Order

_log = logging.getLogger(__name__)
# Characters of a header that an error repeats.
_SHORT = 60
# Levels of a chat's reply above the likelihoods of a token.
_TOKENS = 5


@dataclass(frozen=True)
class Service:
    """Dependencies of the endpoints.

    Attributes:
        scheduler: runs requests.
        preparer: makes them.
        plans: plans that requests may select.
        keys: authorized API keys.
        model: name of the model.
        created: when it was loaded, in seconds since 1970.
        hosts: allowed names in Host headers; none for any.
        origins: allowed web pages besides this server's own.
        log_prompts: write prompts to the log.
    """

    scheduler: Scheduler
    preparer: Preparer
    plans: AllowedPlans
    keys: Keys
    model: str
    created: int
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log_prompts: bool = False


def described(kind: type[Strict]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


_ABOUT = "An API key, where the server has any."
_BEARER = HTTPBearer(auto_error=False, description=_ABOUT)
_API_KEY = APIKeyHeader(name="x-api-key", auto_error=False, description=_ABOUT)


def _owner(
    request: Request,
    bearer: Annotated[object, Depends(_BEARER)],
    api_key: Annotated[str | None, Depends(_API_KEY)],
) -> str:
    """Return the owner of a request. bearer: puts API keys into the schema; Keys reads the header."""
    owner: str | None = request.app.state.service.keys.owner(request.headers.get("authorization"), api_key)
    if owner is None:
        raise Failure(
            401,
            "an API key is needed: send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
            code="invalid_api_key",
        )
    return owner


Owner = Annotated[str, Depends(_owner)]


_Body = TypeVar("_Body", bound=Strict)


def parsed_body(kind: type[_Body]) -> Callable[..., Awaitable[_Body]]:
    """Return the dependency that reads and checks a body in a separate thread, after its key is checked."""

    def validated(data: bytes) -> _Body:
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise failure_of(error) from None

    async def parsed(request: Request, owner: Owner) -> _Body:
        # A web page may send other types without a preflight request.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Failure(415, "the body is JSON: send the header 'Content-Type: application/json'")
        if (coding := request.headers.get("content-encoding", "identity")).strip().lower() != "identity":
            raise Failure(415, f"the body's Content-Encoding is {coding[:_SHORT]!r}; send it uncompressed")
        async with request.app.state.bodies.read(request) as data:
            return await asyncio.to_thread(validated, data)

    return parsed


class Desk:
    """Takes requests to the scheduler, and sends replies.

    Attributes:
        service: dependencies.
    """

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service = service
        self._metrics = metrics

    def check_model(self, name: str) -> None:
        """Raise Failure for a request to another model."""
        own = self.service.model
        if name != own:
            message = f"this server has the model {own!r}, not {name!r}"
            raise Failure(404, message, code="model_not_found", param="model")

    async def begin(self, orders: Sequence[Order]) -> Exchange:
        """Submit the orders of one request."""
        service = self.service
        if service.log_prompts:
            _log.info(
                "prompts: %r", await asyncio.to_thread(lambda: [service.preparer.text(one.ids) for one in orders])
            )
        return Exchange(service.scheduler, orders, self._metrics.note)


async def whole(
    request: Request,
    exchange: Exchange,
    reply: Coroutine[Any, Any, Callable[[], dict[str, Any]]],
    levels: int = _TOKENS,
) -> Response:
    """Wait for a reply, as long as its client does; the function that it returns is called in another thread.

    levels: of the reply, those above the likelihoods of a token.
    """
    answering = asyncio.ensure_future(reply)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)
        build = answering.result()
        # Log-probabilities are long, and written token by token so that other threads can run.
        text = await asyncio.to_thread(lambda: json_text(build(), levels))
        return Response(text, media_type="application/json")
    finally:
        answering.cancel()
        leaving.cancel()
        exchange.cancel()


def streamed(exchange: Exchange, chunks: AsyncIterator[dict[str, Any]]) -> Response:
    """Return a reply that streams chunks as JSON, an error as the last of them, and OpenAI's end mark."""
    return EventStream(_events(exchange, chunks))


async def _events(exchange: Exchange, chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[str, None]:
    async for chunk in guarded(exchange, chunks, lambda failure: failure.body):
        yield event(json_text(chunk))
    yield event("[DONE]")


_Chunk = TypeVar("_Chunk")


async def guarded(
    exchange: Exchange, chunks: AsyncIterator[_Chunk], failed: Callable[[Failure], _Chunk]
) -> AsyncGenerator[_Chunk, None]:
    """Yield the chunks of a stream, whose status has been sent; an error is the last of them, in the form of `failed`.

    The exchange is cancelled at the end.
    """
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        failure = failure_of(error)
        if failure.status == 500:
            _log.error("a stream failed: %s", type(error).__name__, exc_info=error)
        yield failed(failure)
    finally:
        exchange.cancel()
