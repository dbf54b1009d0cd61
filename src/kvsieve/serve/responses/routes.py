"""Endpoints of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal
from uuid import uuid4

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.serve.endpoint import Desk, Owner, described, guarded, parsed_body, whole
from kvsieve.serve.events import EventStream, event
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.failures import Failure, renamed
from kvsieve.serve.replies import json_text
from kvsieve.serve.responses.items import JsonObject
from kvsieve.serve.responses.kept import KeptResponse, KeptResponses, size_of
from kvsieve.serve.responses.reply import ResponseRun
from kvsieve.serve.responses.reply_schema import DELETED, ITEMS, RESPONSE, STORED
from kvsieve.serve.responses.schema import InputItem, ResponsesRequest
from kvsieve.serve.responses.translate import NAMES, chat_request, listed
from kvsieve.serve.ticket import Order

ResponsesBody = Annotated[ResponsesRequest, Depends(parsed_body(ResponsesRequest))]
# Levels of a response above the likelihoods of a token.
_TOKENS = 6
_NO_DOCUMENTS = "the previous response had kv.documents, which are not stored: this prompt is without them"
_REASONS = "it is unknown, deleted, expired, or was not stored"


@dataclass(frozen=True)
class _PreparedResponse:
    """A prepared request.

    Attributes:
        order: of the scheduler.
        earlier: items of the conversation before it, as JSON.
        inputs: items of its input, as JSON.
    """

    order: Order
    earlier: tuple[bytes, ...]
    inputs: tuple[bytes, ...]


def add_responses(app: FastAPI, desk: Desk) -> None:
    """Add /v1/responses and the endpoints of stored responses."""
    endpoints = _Endpoints(desk, KeptResponses())

    @app.post(
        "/v1/responses", responses=RESPONSE, response_class=JSONResponse, openapi_extra=described(ResponsesRequest)
    )
    async def create(request: Request, owner: Owner, body: ResponsesBody) -> Response:
        return await endpoints.create(request, owner, body)

    @app.get("/v1/responses/{name}", responses=STORED, response_class=JSONResponse)
    async def stored(name: str, owner: Owner, stream: bool = False) -> Response:
        if stream:
            raise Failure(400, "stream: a stored response is not streamed again; leave it out", param="stream")
        return Response(endpoints.found(owner, name).reply, media_type="application/json")

    @app.delete("/v1/responses/{name}", responses=DELETED, response_class=JSONResponse)
    async def delete(name: str, owner: Owner) -> Response:
        endpoints.delete(owner, name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @app.get("/v1/responses/{name}/input_items", responses=ITEMS, response_class=JSONResponse)
    async def input_items(
        name: str,
        owner: Owner,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        inputs = endpoints.found(owner, name).inputs
        page = await asyncio.to_thread(_page, inputs, limit, order == "desc", after)
        return Response(page, media_type="application/json")


class _Endpoints:
    def __init__(self, desk: Desk, kept: KeptResponses) -> None:
        self._desk = desk
        self._preparer = desk.service.preparer
        self._kept = kept

    async def create(self, request: Request, owner: str, body: ResponsesRequest) -> Response:
        self._desk.check_model(body.model)
        turn = await asyncio.to_thread(self._prepared, body, owner)

        def keep(reply: JsonObject) -> None:
            if body.store is not False:
                self._kept.put(owner, reply["id"], _kept_response(turn, reply))

        run = ResponseRun(body, turn.order.form, self._preparer.token_bytes, keep)
        exchange = await self._desk.begin([turn.order])
        if body.stream:
            return EventStream(guarded(exchange, _written(run, exchange), lambda failure: _failed(run, failure)))
        return await whole(request, exchange, run.whole(exchange), _TOKENS)

    def found(self, owner: str, name: str) -> KeptResponse:
        """Return a stored response. Raises Failure for one that the owner does not have."""
        found = self._kept.get(owner, name)
        if found is None:
            raise _unknown(name)
        return found

    def delete(self, owner: str, name: str) -> None:
        if not self._kept.drop(owner, name):
            raise _unknown(name)

    def _prepared(self, body: ResponsesRequest, owner: str) -> _PreparedResponse:
        before = self._before(body, owner)
        earlier = () if before is None else before.conversation
        begun = None if body.store is False else uuid4().hex
        chain = begun if before is None else before.chain
        inputs = tuple(json_text(listed(item)).encode() for item in body.input or ())
        if body.store is not False and size_of((*earlier, *inputs)) > self._kept.largest:
            message = f"the conversation takes more than {self._kept.largest} bytes, the most that is stored of one"
            raise Failure(413, f"{message}; send it whole, with store false", code="request_too_large", param="store")
        try:
            chat = chat_request(body, [InputItem.model_validate_json(item) for item in earlier])
            order = self._preparer.chat(chat, owner, chain)
            if before is not None and before.documents and order.documents is None:
                order = replace(order, notes=(*order.notes, _NO_DOCUMENTS))
        except (InputError, UnsupportedOptionError, Failure) as error:
            raise renamed(error, NAMES) from None
        return _PreparedResponse(order, earlier, inputs)

    def _before(self, body: ResponsesRequest, owner: str) -> KeptResponse | None:
        """Return the response that a request continues; None for none. Raises Failure for an unknown one."""
        name = body.previous_response_id
        if name is None:
            return None
        found = self._kept.get(owner, name)
        if found is None:
            message = f"Previous response with id {name!r} not found: {_REASONS}"
            raise Failure(400, message, code="previous_response_not_found", param="previous_response_id")
        return found


async def _written(run: ResponseRun, exchange: Exchange) -> AsyncIterator[str]:
    async for one in run.events(exchange):
        yield event(json_text(one), one["type"])


def _failed(run: ResponseRun, failure: Failure) -> str:
    return "".join(event(json_text(one), one["type"]) for one in run.failed(failure))


def _kept_response(turn: _PreparedResponse, reply: JsonObject) -> KeptResponse:
    outputs = tuple(json_text(_without_logprobs(item)).encode() for item in reply["output"])
    conversation = (*turn.earlier, *turn.inputs, *outputs)
    documents = turn.order.documents is not None
    return KeptResponse(json_text(reply).encode(), turn.inputs, conversation, turn.order.chain or "", documents)


def _without_logprobs(item: JsonObject) -> JsonObject:
    if "content" not in item:
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return {**item, "content": parts}


def _unknown(name: str) -> Failure:
    return Failure(404, f"Response with id {name!r} not found: {_REASONS}")


def _page(inputs: tuple[bytes, ...], limit: int, newest_first: bool, after: str | None) -> str:
    """Return a page of a list of items, as JSON. Raises Failure if there is no item `after`."""
    items: list[JsonObject] = [json.loads(item) for item in inputs]
    if newest_first:
        items.reverse()
    if after is not None:
        numbers = [number for number, item in enumerate(items) if item["id"] == after]
        if not numbers:
            raise Failure(404, f"after: the response has no item with the id {after!r}", param="after")
        items = items[numbers[0] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return json_text({"object": "list", "data": page, **ends, "has_more": len(items) > limit})
