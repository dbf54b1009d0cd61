"""Anthropic's endpoints: /v1/messages and the count of a prompt's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.serve.anthropic.reply import Event, message_events, message_reply
from kvsieve.serve.anthropic.reply_schema import COUNT, MESSAGE
from kvsieve.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from kvsieve.serve.anthropic.translate import chat_request, in_own_names
from kvsieve.serve.endpoint import Desk, Owner, described, guarded, parsed_body, whole
from kvsieve.serve.events import EventStream, event
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.failures import ANTHROPIC, Failure
from kvsieve.serve.replies import json_text
from kvsieve.serve.ticket import Order

MessagesBody = Annotated[MessagesRequest, Depends(parsed_body(MessagesRequest))]
CountBody = Annotated[CountTokensRequest, Depends(parsed_body(CountTokensRequest))]
# The code with it lets clients send all messages instead.
_NO_THREADS = "thread: no conversation is held here; send all of its messages, and leave thread out"


def add_messages(app: FastAPI, desk: Desk) -> None:
    """Add /v1/messages and /v1/messages/count_tokens."""
    preparer = desk.service.preparer

    def ordered(body: CountTokensRequest, owner: str) -> Order:
        chat = chat_request(body, preparer.limits.max_tokens)
        try:
            return preparer.chat(chat, owner)
        except (InputError, UnsupportedOptionError, Failure) as error:
            raise in_own_names(error) from None

    @app.post(ANTHROPIC, responses=MESSAGE, response_class=JSONResponse, openapi_extra=described(MessagesRequest))
    async def messages(request: Request, owner: Owner, body: MessagesBody) -> Response:
        desk.check_model(body.model)
        if body.thread:
            raise Failure(400, _NO_THREADS, code="thread_unsupported_request", param="thread")
        order = await asyncio.to_thread(ordered, body, owner)
        exchange = await desk.begin([order])
        if body.stream:
            return EventStream(_written(exchange, message_events(body, order, exchange)))
        return await whole(request, exchange, message_reply(body, order, exchange))

    @app.post(
        f"{ANTHROPIC}/count_tokens",
        responses=COUNT,
        response_class=JSONResponse,
        openapi_extra=described(CountTokensRequest),
    )
    async def count_tokens(owner: Owner, body: CountBody) -> Response:
        desk.check_model(body.model)
        order = await asyncio.to_thread(ordered, body, owner)
        return JSONResponse({"input_tokens": len(order.ids)})


async def _written(exchange: Exchange, events: AsyncIterator[Event]) -> AsyncGenerator[str, None]:
    async for data in guarded(exchange, events, lambda failure: failure.body_for(ANTHROPIC)):
        yield event(json_text(data), data["type"])
