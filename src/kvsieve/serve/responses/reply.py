"""Responses in progress: the response object, its events and its costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any
from uuid import uuid4

from kvsieve.serve.exchange import Exchange
from kvsieve.serve.failures import Failure
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.replies import TokenBytes, usage
from kvsieve.serve.responses.items import JsonObject, OutputItems
from kvsieve.serve.responses.schema import ResponsesRequest
from kvsieve.serve.ticket import Summary


class ResponseRun:
    """A response in progress. A whole reply is the joined stream.

    Attributes:
        reply: the response object, as it is.

    Args:
        body: the request.
        form: of the answer.
        spelled: returns a token's bytes.
        keep: called with the response object at its end, in another thread.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        form: AnswerForm,
        spelled: TokenBytes,
        keep: Callable[[JsonObject], None],
    ) -> None:
        self.reply = _begun(body)
        self._output = OutputItems(form, spelled)
        self._keep = keep
        self._numbers = count()

    async def events(self, exchange: Exchange) -> AsyncIterator[JsonObject]:
        """Yield the events of the response, each with its number."""
        yield self._state("created")
        yield self._state("in_progress")
        finish = None
        async for _, part in exchange.parts():
            finish = part.finish or finish
            for event in self._output.add(part):
                yield self._numbered(event)
        summaries = [summary for summary in exchange.summaries if summary is not None]
        await asyncio.to_thread(self._complete, finish == "length", summaries)
        yield self._state(self.reply["status"])

    async def whole(self, exchange: Exchange) -> Callable[[], JsonObject]:
        """Wait for the answer; return a function that returns the response object."""
        async for _ in self.events(exchange):
            pass
        return lambda: self.reply

    def failed(self, failure: Failure) -> list[JsonObject]:
        """Return the events of a failure, the last ones of a stream."""
        message = str(failure)
        code = "server_error" if failure.status >= 500 else "invalid_prompt"
        error = {"code": "rate_limit_exceeded" if failure.status == 429 else code, "message": message}
        self.reply |= {"status": "failed", "error": error, "output": self._output.items}
        event = {"type": "error", "code": failure.code, "message": message, "param": failure.param}
        return [self._numbered(event), self._state("failed")]

    def _complete(self, is_cut: bool, summaries: list[Summary]) -> None:
        self.reply |= {"output": self._output.items, "usage": _usage(summaries)}
        if is_cut:
            self.reply |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.reply |= {"status": "completed", "completed_at": int(time.time())}
        self._keep(self.reply)

    def _state(self, name: str) -> JsonObject:
        return self._numbered({"type": f"response.{name}", "response": {**self.reply}})

    def _numbered(self, event: JsonObject) -> JsonObject:
        return {**event, "sequence_number": next(self._numbers)}


def _begun(body: ResponsesRequest) -> JsonObject:
    """Return the response object of a request before its answer."""
    choice = body.tool_choice
    form = None if body.text is None else body.text.format
    tools = body.tools or ()
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.model,
        "output": [],
        "usage": None,
        "previous_response_id": body.previous_response_id,
        "instructions": body.instructions,
        "store": body.store is not False,
        "background": False,
        "temperature": body.temperature or 0.0,
        "top_p": body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tools": [tool.model_dump(exclude={"defer_loading", "output_schema", "allowed_callers"}) for tool in tools],
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "truncation": "disabled",
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _usage(summaries: list[Summary]) -> JsonObject:
    costs: dict[str, Any] = usage(summaries)
    out = {
        "input_tokens": costs["prompt_tokens"],
        # Clients need the number of tokens written, which OpenAI bills.
        "input_tokens_details": {**costs["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": costs["completion_tokens"],
        "output_tokens_details": costs.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": costs["total_tokens"],
    }
    return {**out, "kv": costs["kv"]} if "kv" in costs else out
