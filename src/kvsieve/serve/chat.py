"""/v1/chat/completions: answers to a chat, complete or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from kvsieve.decoding.asked import AnswerPart, ChosenToken, PromptProgress
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.pieces import CallArguments, CallBegin, Piece, Reasoning, Text, WholeAnswer
from kvsieve.serve.replies import Envelope, TokenBytes, chat_logprobs, usage
from kvsieve.serve.schema import ChatRequest
from kvsieve.serve.ticket import Order


async def chat_reply(
    request: ChatRequest, order: Order, exchange: Exchange, spelled: TokenBytes
) -> Callable[[], dict[str, Any]]:
    """Wait for all answers, and return a function that builds the reply in any thread."""
    texts, tokens, ends = await exchange.answers(order.answers)
    summaries = [summary for summary in exchange.summaries if summary is not None]

    def reply() -> dict[str, Any]:
        choices = _choices(order, texts, tokens, ends, spelled)
        return Envelope("chatcmpl", request.model, False).with_choices(choices, usage=usage(summaries))

    return reply


def _choices(
    order: Order, texts: list[str], tokens: list[list[ChosenToken]], ends: list[str], spelled: TokenBytes
) -> list[dict[str, Any]]:
    choices = []
    for number, text in enumerate(texts):
        answer = WholeAnswer(order.form.parser().add(text, last=True))
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        message["refusal"] = None
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        wanted = order.sampling.logprobs is not None
        choices.append(
            {
                "index": number,
                "message": message,
                "logprobs": chat_logprobs(tokens[number], spelled) if wanted else None,
                "finish_reason": order.form.finish(ends[number], bool(answer.calls)),
            }
        )
    return choices


async def chat_chunks(
    request: ChatRequest, order: Order, exchange: Exchange, spelled: TokenBytes
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope("chatcmpl", request.model, True)
    deltas = [ChatDeltas(order.form) for _ in range(order.answers)]
    wanted = request.stream_options is not None and request.stream_options.include_usage
    none = {"usage": None} if wanted else {}
    for number in range(order.answers):
        yield envelope.with_choices([_choice(number, {"role": "assistant", "content": ""})], **none)
    async for _, part in exchange.parts():
        if part.progress is not None:
            yield envelope.with_choices([], prompt_progress=_progress(part.progress), **none)
            continue
        for delta, tokens, finish in deltas[part.answer].add(part):
            logprobs = chat_logprobs(tokens, spelled) if tokens else None
            yield envelope.with_choices([_choice(part.answer, delta, logprobs, finish)], **none)
    if wanted:
        yield envelope.with_choices([], usage=usage([summary for summary in exchange.summaries if summary is not None]))


class ChatDeltas:
    """Deltas of a streamed answer, each with the tokens chosen since the one before it."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._parser = form.parser()
        self._tokens = list[ChosenToken]()
        self._calls = False

    def add(self, part: AnswerPart) -> list[tuple[dict[str, Any], list[ChosenToken], str | None]]:
        """Return the final deltas so far, their tokens, and the finish reason."""
        self._tokens += part.tokens
        pieces = self._parser.add(part.text, last=part.finish is not None)
        self._calls = self._calls or any(isinstance(piece, CallBegin) for piece in pieces)
        deltas = [_delta(piece) for piece in pieces]
        if not deltas and part.finish is None:
            return []
        if self._tokens and not deltas:
            deltas = [{"content": ""}]
        tokens = self._tokens
        self._tokens = []
        out: list[tuple[dict[str, Any], list[ChosenToken], str | None]] = []
        for number, delta in enumerate(deltas):
            out.append((delta, [] if number else tokens, None))
        if part.finish is not None:
            out.append(({}, [], self._form.finish(part.finish, self._calls)))
        return out


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(call, call_id, name):
            begun = {"index": call, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [begun]}
        case CallArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _progress(progress: PromptProgress) -> dict[str, int]:
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.done,
        "time_ms": round(1000 * progress.seconds),
    }


def _choice(number: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
