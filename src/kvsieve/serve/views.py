"""Endpoints for the operator: the model, the state, health and metrics."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from kvsieve.serve.endpoint import Owner, Service
from kvsieve.serve.failures import Failure
from kvsieve.serve.metrics import Metrics
from kvsieve.serve.reply_schema import ERRORS, HEALTH, METRICS, KVReply, ModelReply, ModelsReply


def add_views(app: FastAPI, service: Service, metrics: Metrics) -> None:
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
            edits=service.plans.edits,
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
