"""/v1/completions: continuations of texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvsieve.serve.exchange import Exchange
from kvsieve.serve.replies import Envelope, TokenBytes, completion_logprobs, usage
from kvsieve.serve.schema import CompletionRequest
from kvsieve.serve.ticket import Order


async def completion_reply(
    request: CompletionRequest, orders: Sequence[Order], exchange: Exchange, spelled: TokenBytes
) -> Callable[[], dict[str, Any]]:
    """Wait for all answers, and return a function that builds the reply in any thread."""
    answers = orders[0].answers
    texts, tokens, ends = await exchange.answers(answers)
    texts = [orders[at // answers].echo + text for at, text in enumerate(texts)]
    wanted = orders[0].sampling.logprobs is not None
    summaries = [one for one in exchange.summaries if one is not None]

    def reply() -> dict[str, Any]:
        logprobs = [completion_logprobs(answer, spelled) if wanted else None for answer in tokens]
        choices = [_choice(at, *parts) for at, parts in enumerate(zip(texts, logprobs, ends, strict=True))]
        return Envelope("cmpl", request.model, False).with_choices(choices, usage=usage(summaries))

    return reply


async def completion_chunks(
    request: CompletionRequest, orders: Sequence[Order], exchange: Exchange, spelled: TokenBytes
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope("cmpl", request.model, True)
    answers = orders[0].answers
    wanted = request.stream_options is not None and request.stream_options.include_usage
    none = {"usage": None} if wanted else {}
    for at, echo in enumerate(order.echo for order in orders for _ in range(answers)):
        if echo:
            yield envelope.with_choices([_choice(at, echo, None, None)], **none)
    async for number, part in exchange.parts():
        at = number * answers + part.answer
        logprobs = completion_logprobs(part.tokens, spelled) if part.tokens else None
        yield envelope.with_choices([_choice(at, part.text, logprobs, part.finish)], **none)
    if wanted:
        yield envelope.with_choices([], usage=usage([one for one in exchange.summaries if one is not None]))


def _choice(at: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": finish}
