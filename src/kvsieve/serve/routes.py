"""OpenAI's endpoints for chats and completions, and the tokenizer's."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kvsieve.serve.chat import chat_chunks, chat_reply
from kvsieve.serve.completions import completion_chunks, completion_reply
from kvsieve.serve.endpoint import Desk, Owner, described, parsed_body, streamed, whole
from kvsieve.serve.replies import json_text
from kvsieve.serve.reply_schema import CHAT, COMPLETION, TOKENIZE
from kvsieve.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest

ChatBody = Annotated[ChatRequest, Depends(parsed_body(ChatRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(parsed_body(CompletionRequest))]
TokenizeBody = Annotated[TokenizeRequest, Depends(parsed_body(TokenizeRequest))]


def add_completions(app: FastAPI, desk: Desk) -> None:
    """Add /v1/chat/completions, /v1/completions and /tokenize."""
    preparer = desk.service.preparer
    spelled = preparer.token_bytes

    @app.post("/v1/chat/completions", responses=CHAT, response_class=JSONResponse, openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request, owner: Owner, body: ChatBody) -> Response:
        desk.check_model(body.model)
        order = await asyncio.to_thread(preparer.chat, body, owner)
        exchange = await desk.begin([order])
        if body.stream:
            return streamed(exchange, chat_chunks(body, order, exchange, spelled))
        return await whole(request, exchange, chat_reply(body, order, exchange, spelled))

    @app.post(
        "/v1/completions",
        responses=COMPLETION,
        response_class=JSONResponse,
        openapi_extra=described(CompletionRequest),
    )
    async def completions(request: Request, owner: Owner, body: CompletionBody) -> Response:
        desk.check_model(body.model)
        orders = await asyncio.to_thread(preparer.completion, body, owner)
        exchange = await desk.begin(orders)
        if body.stream:
            return streamed(exchange, completion_chunks(body, orders, exchange, spelled))
        return await whole(request, exchange, completion_reply(body, orders, exchange, spelled))

    @app.post("/tokenize", responses=TOKENIZE, response_class=JSONResponse, openapi_extra=described(TokenizeRequest))
    async def tokenize(body: TokenizeBody) -> Response:
        desk.check_model(body.model)

        def text() -> str:
            ids = preparer.tokens(body)
            tokens = None if body.count_only else ids
            context = desk.service.scheduler.context
            return json_text({"count": len(ids), "max_model_len": context, "tokens": tokens})

        return Response(await asyncio.to_thread(text), media_type="application/json")
