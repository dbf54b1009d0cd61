"""The HTTP application: its endpoints, guards and errors, put together."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from kvsieve.errors import KvsieveError
from kvsieve.serve.anthropic.routes import add_messages
from kvsieve.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from kvsieve.serve.bodies import Bodies
from kvsieve.serve.endpoint import Desk, Service
from kvsieve.serve.failures import Failure, failure_of
from kvsieve.serve.guards import Edge, json_error
from kvsieve.serve.metrics import Metrics
from kvsieve.serve.page import add_page
from kvsieve.serve.responses.routes import add_responses
from kvsieve.serve.responses.schema import ResponsesRequest
from kvsieve.serve.routes import add_completions
from kvsieve.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest
from kvsieve.serve.views import add_views
from kvsieve.version import __version__

_log = logging.getLogger(__name__)
_ADDRESSES = (
    "OpenAI's clients take the server's address with /v1, Anthropic's without, and /openapi.json lists all paths"
)
_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, ResponsesRequest, MessagesRequest, CountTokensRequest)


def create_app(service: Service) -> FastAPI:
    app = _Application(title="kvsieve", version=__version__, docs_url=None, redoc_url=None)
    metrics = Metrics(service.scheduler)
    limits = service.preparer.limits
    app.state.service, app.state.metrics, app.state.bodies = service, metrics, Bodies(limits)
    app.add_middleware(Edge, most=limits.requests, hosts=service.hosts)
    if service.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.origins,
            allow_methods=["GET", "POST", "DELETE"],
            # Those of OpenAI's and Anthropic's clients, whose names change with their releases.
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )

    async def tell(request: Request, error: Exception) -> Response:
        failure = failure_of(error)
        if failure.status == 500:
            _log.error("%s failed: %s", request.url.path, type(error).__name__, exc_info=error)
        if failure.status == 404 and isinstance(error, HTTPException):
            failure = Failure(404, f"there is no path {request.url.path!r} here; {_ADDRESSES}")
        if failure.status == 405:
            allowed = ", ".join(app.methods_of(request))
            message = f"{request.url.path!r} takes {allowed}, got {request.method}"
            failure = Failure(405, message, headers={"Allow": allowed})
        return json_error(failure, request.url.path)

    for kind in (HTTPException, RequestValidationError, Failure, KvsieveError, Exception):
        app.add_exception_handler(kind, tell)
    desk = Desk(service, metrics)
    add_completions(app, desk)
    add_responses(app, desk)
    add_messages(app, desk)
    add_views(app, service, metrics)
    add_page(app)
    return app


class _Application(FastAPI):
    """FastAPI that describes the bodies read by `parsed_body` like those it reads itself."""

    def methods_of(self, request: Request) -> list[str]:
        """Return the methods of a request's path; the router's own answer knows those of one route only."""
        found = (route for route in self.routes if isinstance(route, Route))
        matching = (route for route in found if route.matches(request.scope)[0] is not Match.NONE)
        return sorted({method for route in matching for method in route.methods or ()})

    def openapi(self) -> dict[str, Any]:
        is_new = self.openapi_schema is None
        schema: dict[str, Any] = super().openapi()
        if is_new:
            kinds = [(model, "validation") for model in _BODIES]
            _, defined = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema["components"]["schemas"] |= defined["$defs"]
        return schema
