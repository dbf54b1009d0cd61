"""/v1/chat/completions: answers to a chat, complete or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from kvsieve.decoding.asked import AnswerPart, ChosenToken, PromptProgress
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.replies import Envelope, TokenBytes, chat_logprobs, usage
from kvsieve.serve.schema import ChatRequest
from kvsieve.serve.ticket import Order
from kvsieve.serve.tools import MARK, CallForm, split_calls


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
    for number, said in enumerate(texts):
        content, calls = (said, []) if order.calls is None else split_calls(said, order.calls)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = calls
        wanted = order.sampling.logprobs is not None
        choices.append(
            {
                "index": number,
                "message": message,
                "logprobs": chat_logprobs(tokens[number], spelled) if wanted else None,
                "finish_reason": "tool_calls" if calls else ends[number],
            }
        )
    return choices


async def chat_chunks(
    request: ChatRequest, order: Order, exchange: Exchange, spelled: TokenBytes
) -> AsyncIterator[dict[str, Any]]:
    envelope = Envelope("chatcmpl", request.model, True)
    texts = [HeldText(order.calls) for _ in range(order.answers)]
    wanted = request.stream_options is not None and request.stream_options.include_usage
    none = {"usage": None} if wanted else {}
    for number in range(order.answers):
        yield envelope.with_choices([_choice(number, {"role": "assistant", "content": ""})], **none)
    async for _, part in exchange.parts():
        if part.progress is not None:
            yield envelope.with_choices([], prompt_progress=_progress(part.progress), **none)
            continue
        for delta, tokens, finish in texts[part.answer].deltas(part):
            logprobs = chat_logprobs(tokens, spelled) if tokens else None
            yield envelope.with_choices([_choice(part.answer, delta, logprobs, finish)], **none)
    if wanted:
        yield envelope.with_choices([], usage=usage([summary for summary in exchange.summaries if summary is not None]))


class HeldText:
    """Text of an answer that may be a tool call, buffered until that is known."""

    def __init__(self, form: CallForm | None) -> None:
        self._form, self._text, self._tokens = form, "", list[ChosenToken]()
        # A bare object is a call only if no text precedes it.
        self._begun = False

    def deltas(self, part: AnswerPart) -> list[tuple[dict[str, Any], list[ChosenToken], str | None]]:
        """Return the final deltas so far, their tokens, and the finish reason."""
        self._text += part.text
        self._tokens += part.tokens
        if self._form is not None and not part.finish:
            at = self._text.find(MARK) if self._form.marked else -1
            if at > 0 and self._text[:at].strip():
                said = self._text[:at]
                self._text = self._text[at:]
                self._begun = True
                return [({"content": said}, [], None)]
            ends = self._form.marked and _ends_like_mark(self._text)
            if at >= 0 or ends or (not self._begun and self._form.may_begin(self._text)):
                return []
        text = self._text
        tokens = self._tokens
        self._text = ""
        self._tokens = []
        self._begun = True
        out: list[tuple[dict[str, Any], list[ChosenToken], str | None]] = []
        finish = part.finish
        if finish and self._form is not None:
            text, calls = split_calls(text, self._form)
            if calls:
                listed = [{"index": number, **call} for number, call in enumerate(calls)]
                out = [({"tool_calls": listed}, [], None)]
                finish = "tool_calls"
        if text or tokens:
            out.insert(0, ({"content": text}, tokens, None))
        return [*out, ({}, [], finish)] if finish else out


def _ends_like_mark(text: str) -> bool:
    return any(text.endswith(MARK[:count]) for count in range(1, len(MARK)))


def _progress(progress: PromptProgress) -> dict[str, int]:
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.done,
        "time_ms": round(1000 * progress.seconds),
    }


def _choice(number: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
