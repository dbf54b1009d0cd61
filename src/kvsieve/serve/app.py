"""The HTTP application: OpenAI's endpoints, what the operator looks at, and the page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

import kvsieve
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.chat import chat_chunks, chat_reply, event
from kvsieve.serve.completions import completion_chunks, completion_reply
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.failures import Failure, failure_of
from kvsieve.serve.guards import BoundedBodies, json_error
from kvsieve.serve.keys import Keys
from kvsieve.serve.metrics import Metrics
from kvsieve.serve.prepare import Preparer
from kvsieve.serve.reply_schema import (
    CHAT,
    COMPLETION,
    ERRORS,
    HEALTH,
    METRICS,
    KVReply,
    ModelReply,
    ModelsReply,
)
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.schema import ChatRequest, CommonRequest, CompletionRequest
from kvsieve.serve.ticket import Order

_log = logging.getLogger(__name__)
_PAGE = files("kvsieve.serve").joinpath("page.html")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class Service:
    """All that the endpoints use.

    Attributes:
        scheduler: runs requests.
        preparer: makes them.
        plans: those that requests may ask for.
        keys: who may ask.
        model: name of the model.
        created: when it was loaded, in seconds since 1970.
        hosts: names that requests may have in their Host header; none for any.
        log_prompts: write prompts to the log.
    """

    scheduler: Scheduler
    preparer: Preparer
    plans: AllowedPlans
    keys: Keys
    model: str
    created: int
    hosts: tuple[str, ...] = ()
    log_prompts: bool = False


def create_app(service: Service) -> FastAPI:
    """Make the application."""
    app = FastAPI(title="kvsieve", version=kvsieve.__version__, docs_url=None, redoc_url=None)
    metrics = Metrics(service.scheduler)
    app.state.service, app.state.metrics = service, metrics
    app.add_middleware(BoundedBodies, most=service.preparer.limits.body_bytes)
    if service.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(service.hosts))

    async def tell(request: Request, error: Exception) -> Response:
        failure = failure_of(error)
        if failure.status == 500:
            _log.error("%s failed: %s", request.url.path, type(error).__name__, exc_info=error)
        return json_error(failure)

    for kind in (HTTPException, RequestValidationError, Failure, kvsieve.KvsieveError, Exception):
        app.add_exception_handler(kind, tell)
    _add_completions(app, service, metrics)
    _add_views(app, service, metrics)
    return app


_BEARER = HTTPBearer(auto_error=False, description="An API key, where the server has any.")


def _owner(request: Request, told: Annotated[object, Depends(_BEARER)]) -> str:
    """Whose request it is. told: what makes the schema tell of keys; the header is read by Keys."""
    owner: str | None = request.app.state.service.keys.owner(request.headers.get("authorization"))
    if owner is None:
        raise Failure(401, "an API key is needed: send the header 'Authorization: Bearer KEY'", code="invalid_api_key")
    if request.method == "POST" and request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise Failure(415, "the body is JSON: send the header 'Content-Type: application/json'")
    return owner


Owner = Annotated[str, Depends(_owner)]


def _check_model(service: Service, request: CommonRequest) -> None:
    if request.model != service.model:
        message = f"this server has the model {service.model!r}, not {request.model!r}"
        raise Failure(404, message, code="model_not_found", param="model")


def _add_completions(app: FastAPI, service: Service, metrics: Metrics) -> None:
    preparer, text = service.preparer, service.preparer.token_text

    async def begin(body: CommonRequest, orders: Sequence[Order]) -> Exchange:
        if service.log_prompts:
            _log.info("prompts: %r", [preparer.text(order.ids) for order in orders])
        return Exchange(service.scheduler, orders, metrics.note)

    @app.post("/v1/chat/completions", responses=CHAT, response_class=JSONResponse)
    async def chat_completions(request: Request, body: ChatRequest, owner: Owner) -> Response:
        _check_model(service, body)
        order = await asyncio.to_thread(preparer.chat, body, owner)
        exchange = await begin(body, [order])
        if body.stream:
            return _stream(chat_chunks(body, order, exchange, text))
        return await _whole(request, exchange, chat_reply(body, order, exchange, text))

    @app.post("/v1/completions", responses=COMPLETION, response_class=JSONResponse)
    async def completions(request: Request, body: CompletionRequest, owner: Owner) -> Response:
        _check_model(service, body)
        orders = await asyncio.to_thread(preparer.completion, body, owner)
        exchange = await begin(body, orders)
        echoes = [preparer.text(order.ids) if body.echo else "" for order in orders]
        if body.stream:
            return _stream(completion_chunks(body, orders, exchange, text, echoes))
        return await _whole(request, exchange, completion_reply(body, orders, exchange, text, echoes))


def _stream(chunks: AsyncIterator[dict[str, Any]]) -> Response:
    async def events() -> AsyncIterator[dict[str, str]]:
        try:
            async for chunk in chunks:
                yield event(chunk)
            yield {"data": "[DONE]"}
        except Exception as error:
            failure = failure_of(error)
            if failure.status == 500:
                _log.error("a stream failed: %s", type(error).__name__, exc_info=error)
            # The status is sent already.
            yield event(failure.body)

    return EventSourceResponse(events(), sep="\n")


async def _whole(request: Request, exchange: Exchange, reply: Any) -> Response:
    """Wait for a reply for as long as its client does."""
    answering = asyncio.ensure_future(reply)
    try:
        while True:
            done, _ = await asyncio.wait({answering}, timeout=0.5)
            if done:
                return JSONResponse(await answering)
            if await request.is_disconnected():
                return Response(status_code=499)
    finally:
        answering.cancel()
        exchange.cancel()


def _add_views(app: FastAPI, service: Service, metrics: Metrics) -> None:
    scheduler = service.scheduler

    @app.get("/v1/models", responses=ERRORS)
    async def models(owner: Owner) -> ModelsReply:
        return ModelsReply(object="list", data=[_model(service)])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str, owner: Owner) -> ModelReply:
        if name != service.model:
            raise Failure(404, f"this server has the model {service.model!r}", code="model_not_found", param="model")
        return _model(service)

    @app.get("/v1/kv", responses=ERRORS)
    async def kv(owner: Owner) -> KVReply:
        return KVReply(
            state=scheduler.state(),
            counts=dict(scheduler.counts),
            store=scheduler.prefixes.told(),
            nodes=scheduler.prefixes.nodes(owner),
            plan=service.plans.own.name,
            methods=list(service.plans.methods),
            budget=None if service.plans.budget is None else str(service.plans.budget),
            codecs=service.plans.codecs,
            context=scheduler.context,
            chunk=scheduler.limits.chunk,
            max_tokens=scheduler.limits.max_tokens,
        )

    @app.get("/health", responses=HEALTH, response_class=JSONResponse)
    async def health() -> Response:
        alive = scheduler.alive
        return JSONResponse({"status": "ok" if alive else "closing"}, 200 if alive else 503)

    @app.get("/metrics", responses=METRICS, response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _POLICY})


def _model(service: Service) -> ModelReply:
    return ModelReply(id=service.model, object="model", created=service.created, owned_by="kvsieve")
