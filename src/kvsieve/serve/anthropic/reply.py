"""Answers in Anthropic's protocol: content blocks, whole and as events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from kvsieve.decoding.asked import AnswerPart
from kvsieve.serve.anthropic.schema import MessagesRequest
from kvsieve.serve.anthropic.translate import ID_PREFIX
from kvsieve.serve.exchange import Exchange
from kvsieve.serve.parsers.form import AnswerParser
from kvsieve.serve.pieces import CallArguments, CallBegin, Piece, Reasoning, Text
from kvsieve.serve.replies import usage
from kvsieve.serve.ticket import Order, Summary

# Clients send the signature of thinking back as it is, and some refuse an empty one.
_SIGNATURE = "kvsieve"
Event = dict[str, Any]


class ContentBlocks:
    """Events of an answer's content blocks.

    Attributes:
        has_calls: one of the blocks is a tool call.

    Args:
        parser: of the answer.
        shows_thinking: thinking blocks have their text.
    """

    def __init__(self, parser: AnswerParser, shows_thinking: bool = True) -> None:
        self.has_calls = False
        self._parser = parser
        self._shows_thinking = shows_thinking
        self._index = -1
        # Kind of the open block; "" for none.
        self._kind = ""
        # White space before a text, which no block begins with alone, and arguments that are no object yet.
        self._space = ""
        self._arguments = ""
        self._is_object = False

    def add(self, part: AnswerPart) -> list[Event]:
        """Return the events of a part; the last one closes its block."""
        last = part.finish is not None
        pieces = self._parser.add(part.text, last=last)
        events = [event for piece in pieces for event in self._events(piece)]
        return [*events, *self._closed()] if last else events

    def _events(self, piece: Piece) -> list[Event]:
        match piece:
            case Text(text):
                return self._with_text(text)
            case Reasoning(text):
                opened = [] if self._kind == "thinking" else self._opened("thinking", thinking="", signature="")
                return [*opened, self._delta("thinking_delta", thinking=text)] if self._shows_thinking else opened
            case CallBegin(_, call_id, name):
                self.has_calls = True
                self._arguments = ""
                self._is_object = False
                return self._opened("tool_use", id=f"{ID_PREFIX}{call_id}", name=name, input={})
            case CallArguments(_, text):
                return self._with_arguments(text)

    def _with_text(self, text: str) -> list[Event]:
        if self._kind == "text":
            return [self._delta("text_delta", text=text)]
        self._space += text
        if not self._space.strip():
            return []
        text = self._space
        return [*self._opened("text", text=""), self._delta("text_delta", text=text)]

    def _with_arguments(self, text: str) -> list[Event]:
        """Send the arguments of an object as they come; others become one at the end of the call."""
        self._arguments += text
        self._is_object = self._is_object or self._arguments.lstrip().startswith("{")
        if not self._is_object:
            return []
        text = self._arguments
        self._arguments = ""
        return [self._delta("input_json_delta", partial_json=text)]

    def _opened(self, kind: str, **members: Any) -> list[Event]:
        before = self._closed()
        self._index += 1
        self._kind = kind
        self._space = ""
        block = {"type": kind, **members}
        return [*before, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _closed(self) -> list[Event]:
        if not self._kind:
            return []
        events = []
        if self._kind == "thinking":
            events = [self._delta("signature_delta", signature=_SIGNATURE)]
        elif self._kind == "tool_use" and self._arguments.strip():
            text = json.dumps(_object(self._arguments), ensure_ascii=False)
            events = [self._delta("input_json_delta", partial_json=text)]
        self._kind = ""
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, kind: str, **member: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **member}}


def content(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Put content blocks together from their events."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
            arguments = ""
        elif event["type"] == "content_block_delta":
            ((name, text),) = ((name, text) for name, text in event["delta"].items() if name != "type")
            if name == "partial_json":
                arguments += text
            else:
                blocks[-1][name] += text
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = _object(arguments)
    return blocks


def _object(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object, up to where they were cut off; what is none becomes its member."""
    try:
        value = from_json(text.strip() or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


async def message_reply(body: MessagesRequest, order: Order, exchange: Exchange) -> Callable[[], dict[str, Any]]:
    """Wait for the answer, and return a function that builds the reply in any thread."""
    texts = []
    last = AnswerPart(0, "")
    async for _, last in exchange.parts():
        texts.append(last.text)
    whole = replace(last, text="".join(texts), finish=last.finish or "stop")
    summary = exchange.summaries[0]
    blocks = _blocks(body, order)

    def reply() -> dict[str, Any]:
        message = {**_head(body), "content": content(blocks.add(whole))}
        return {**message, **_end(body, whole, blocks.has_calls), "usage": _usage(summary)}

    return reply


async def message_events(body: MessagesRequest, order: Order, exchange: Exchange) -> AsyncIterator[Event]:
    """Yield the events of a streamed reply. Its first counts no cached tokens, which are not known yet."""
    blocks = _blocks(body, order)
    begun: Event = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _counts(len(order.ids), 0, 0)}
    yield {"type": "message_start", "message": {**_head(body), **begun}}
    yield {"type": "ping"}
    last = AnswerPart(0, "")
    async for _, last in exchange.parts():
        for event in blocks.add(last):
            yield event
    end = _end(body, last, blocks.has_calls)
    yield {"type": "message_delta", "delta": end, "usage": _usage(exchange.summaries[0])}
    yield {"type": "message_stop"}


def _blocks(body: MessagesRequest, order: Order) -> ContentBlocks:
    omitted = body.thinking is not None and body.thinking.display == "omitted"
    return ContentBlocks(order.form.parser(), not omitted)


def _head(body: MessagesRequest) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}


def _end(body: MessagesRequest, last: AnswerPart, has_calls: bool) -> dict[str, Any]:
    """Return why the answer ended. A checkpoint's own stop texts are ends of its turn."""
    if last.finish == "length":
        reason = "max_tokens"
    elif has_calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if last.stop in (body.stop_sequences or ()) else "end_turn"
    return {"stop_reason": reason, "stop_sequence": last.stop if reason == "stop_sequence" else None}


def _usage(summary: Summary | None) -> dict[str, Any]:
    if summary is None:
        return _counts(0, 0, 0)
    counts = _counts(summary.prompt_tokens, summary.cached_tokens, summary.new_tokens)
    if summary.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": summary.reasoning_tokens}
    return {**counts, **{name: kv for name, kv in usage([summary]).items() if name == "kv"}}


def _counts(prompt: int, cached: int, new: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": new,
    }
