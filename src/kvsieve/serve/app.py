"""The HTTP application: OpenAI's endpoints, the operator's endpoints, and the page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from kvsieve.errors import KvsieveError
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.bodies import Bodies
from kvsieve.serve.chat import chat_chunks, chat_reply
from kvsieve.serve.completions import completion_chunks, completion_reply
from kvsieve.serve.events import EventStream, left
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.failures import Failure, failure_of
from kvsieve.serve.guards import Edge, json_error
from kvsieve.serve.keys import Keys
from kvsieve.serve.metrics import Metrics
from kvsieve.serve.page import add_page
from kvsieve.serve.prepare import Preparer
from kvsieve.serve.replies import json_text
from kvsieve.serve.reply_schema import (
    CHAT,
    COMPLETION,
    ERRORS,
    HEALTH,
    METRICS,
    TOKENIZE,
    KVReply,
    ModelReply,
    ModelsReply,
)
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.schema import ChatRequest, CommonRequest, CompletionRequest, Strict, TokenizeRequest
from kvsieve.serve.ticket import Order
from kvsieve.version import __version__

_log = logging.getLogger(__name__)
# Levels of a reply above the likelihoods of a token.
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


def create_app(service: Service) -> FastAPI:
    app = _Application(title="kvsieve", version=__version__, docs_url=None, redoc_url=None)
    metrics = Metrics(service.scheduler)
    limits = service.preparer.limits
    app.state.service, app.state.metrics, app.state.bodies = service, metrics, Bodies(limits)
    app.add_middleware(Edge, most=limits.requests, hosts=service.hosts)
    if service.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    async def tell(request: Request, error: Exception) -> Response:
        failure = failure_of(error)
        if failure.status == 500:
            _log.error("%s failed: %s", request.url.path, type(error).__name__, exc_info=error)
        return json_error(failure)

    for kind in (HTTPException, RequestValidationError, Failure, KvsieveError, Exception):
        app.add_exception_handler(kind, tell)
    _add_completions(app, service, metrics)
    _add_views(app, service, metrics)
    add_page(app)
    return app


class _Application(FastAPI):
    """FastAPI that describes the bodies read by `_parsed` like those it reads itself."""

    def openapi(self) -> dict[str, Any]:
        is_new = self.openapi_schema is None
        schema: dict[str, Any] = super().openapi()
        if is_new:
            kinds = [(model, "validation") for model in (ChatRequest, CompletionRequest, TokenizeRequest)]
            _, defined = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema["components"]["schemas"] |= defined["$defs"]
        return schema


def _described(kind: type[Strict]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


_BEARER = HTTPBearer(auto_error=False, description="An API key, where the server has any.")


def _owner(request: Request, bearer: Annotated[object, Depends(_BEARER)]) -> str:
    """Return the owner of a request. bearer: puts API keys into the schema; Keys reads the header."""
    owner: str | None = request.app.state.service.keys.owner(request.headers.get("authorization"))
    if owner is None:
        raise Failure(401, "an API key is needed: send the header 'Authorization: Bearer KEY'", code="invalid_api_key")
    return owner


Owner = Annotated[str, Depends(_owner)]


_Body = TypeVar("_Body", bound=Strict)


def _parsed(kind: type[_Body]) -> Callable[..., Awaitable[_Body]]:
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
        async with request.app.state.bodies.read(request) as data:
            return await asyncio.to_thread(validated, data)

    return parsed


ChatBody = Annotated[ChatRequest, Depends(_parsed(ChatRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(_parsed(CompletionRequest))]
TokenizeBody = Annotated[TokenizeRequest, Depends(_parsed(TokenizeRequest))]


def _check_model(service: Service, request: CommonRequest | TokenizeRequest) -> None:
    if request.model != service.model:
        message = f"this server has the model {service.model!r}, not {request.model!r}"
        raise Failure(404, message, code="model_not_found", param="model")


def _add_completions(app: FastAPI, service: Service, metrics: Metrics) -> None:
    preparer = service.preparer
    spelled = service.preparer.token_bytes

    def texts(orders: Sequence[Order]) -> list[str]:
        return [preparer.text(order.ids) for order in orders]

    async def begin(orders: Sequence[Order]) -> Exchange:
        if service.log_prompts:
            _log.info("prompts: %r", await asyncio.to_thread(texts, orders))
        return Exchange(service.scheduler, orders, metrics.note)

    @app.post(
        "/v1/chat/completions", responses=CHAT, response_class=JSONResponse, openapi_extra=_described(ChatRequest)
    )
    async def chat_completions(request: Request, owner: Owner, body: ChatBody) -> Response:
        _check_model(service, body)
        order = await asyncio.to_thread(preparer.chat, body, owner)
        exchange = await begin([order])
        if body.stream:
            return EventStream(_events(chat_chunks(body, order, exchange, spelled), exchange))
        return await _whole(request, exchange, chat_reply(body, order, exchange, spelled))

    @app.post(
        "/v1/completions",
        responses=COMPLETION,
        response_class=JSONResponse,
        openapi_extra=_described(CompletionRequest),
    )
    async def completions(request: Request, owner: Owner, body: CompletionBody) -> Response:
        _check_model(service, body)
        orders = await asyncio.to_thread(preparer.completion, body, owner)
        exchange = await begin(orders)
        if body.stream:
            return EventStream(_events(completion_chunks(body, orders, exchange, spelled), exchange))
        return await _whole(request, exchange, completion_reply(body, orders, exchange, spelled))

    @app.post("/tokenize", responses=TOKENIZE, response_class=JSONResponse, openapi_extra=_described(TokenizeRequest))
    async def tokenize(body: TokenizeBody) -> Response:
        _check_model(service, body)

        def text() -> str:
            ids = preparer.tokens(body)
            tokens = None if body.count_only else ids
            return json_text({"count": len(ids), "max_model_len": service.scheduler.context, "tokens": tokens})

        return Response(await asyncio.to_thread(text), media_type="application/json")


async def _events(chunks: AsyncIterator[dict[str, Any]], exchange: Exchange) -> AsyncGenerator[str, None]:
    """Yield chunks as JSON, an error as the last of them, and the end mark."""
    try:
        async for chunk in chunks:
            yield json_text(chunk)
    except Exception as error:
        failure = failure_of(error)
        if failure.status == 500:
            _log.error("a stream failed: %s", type(error).__name__, exc_info=error)
        # The status has been sent.
        yield json_text(failure.body)
    finally:
        exchange.cancel()
    yield "[DONE]"


async def _whole(
    request: Request, exchange: Exchange, reply: Coroutine[Any, Any, Callable[[], dict[str, Any]]]
) -> Response:
    """Wait for a reply, as long as its client does."""
    answering = asyncio.ensure_future(reply)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)
        build = answering.result()
        # Log-probabilities are long, and written token by token so that other threads can run.
        text = await asyncio.to_thread(lambda: json_text(build(), _TOKENS))
        return Response(text, media_type="application/json")
    finally:
        answering.cancel()
        leaving.cancel()
        exchange.cancel()


def _add_views(app: FastAPI, service: Service, metrics: Metrics) -> None:
    scheduler = service.scheduler

    # Endpoints that read the store wait for it in separate threads.
    @app.get("/v1/models", responses=ERRORS)
    async def models(owner: Owner) -> ModelsReply:
        return ModelsReply(object="list", data=[_model(service)])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str, owner: Owner) -> ModelReply:
        if name != service.model:
            raise Failure(404, f"this server has the model {service.model!r}", code="model_not_found", param="model")
        return _model(service)

    @app.get("/v1/kv", responses=ERRORS)
    def kv(owner: Owner) -> KVReply:
        return KVReply(
            state=scheduler.state(),
            counts=dict(scheduler.counts),
            store=scheduler.prefixes.to_dict(),
            nodes=scheduler.prefixes.nodes(owner),
            plan=service.plans.own.name,
            methods=list(service.plans.methods),
            budget=None if service.plans.budget is None else str(service.plans.budget),
            codecs=service.plans.codecs,
            draft=service.plans.draft_name,
            context=scheduler.context,
            chunk=scheduler.limits.chunk,
            max_tokens=scheduler.limits.max_tokens,
        )

    @app.get("/health", responses=HEALTH, response_class=JSONResponse)
    async def health() -> Response:
        alive = scheduler.alive
        return JSONResponse({"status": "ok" if alive else "closing"}, 200 if alive else 503)

    @app.get("/metrics", responses=METRICS, response_class=PlainTextResponse)
    def metrics_text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(service: Service) -> ModelReply:
    return ModelReply(id=service.model, object="model", created=service.created, owned_by="kvsieve")
