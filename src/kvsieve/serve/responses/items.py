"""Output items of a response and their events, made from the pieces of an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any
from uuid import uuid4

from kvsieve.decoding.asked import AnswerPart, ChosenToken
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.pieces import CallArguments, CallBegin, Piece, Reasoning, Text
from kvsieve.serve.replies import TokenBytes, chat_logprobs

JsonObject = dict[str, Any]


class OutputItems:
    """Output items of a response.

    Attributes:
        items: those that are complete, in order.

    Args:
        form: of the answer.
        spelled: returns a token's bytes.
    """

    def __init__(self, form: AnswerForm, spelled: TokenBytes) -> None:
        self.items: list[JsonObject] = []
        self._parser = form.parser()
        self._spelled = spelled
        self._tokens: list[ChosenToken] = []
        self._open: _OutputItem | None = None

    def add(self, part: AnswerPart) -> list[JsonObject]:
        """Return the events of a part of the answer; the last part completes all items."""
        self._tokens += part.tokens
        events = []
        for piece in self._parser.add(part.text, last=part.finish is not None):
            events += self._add(piece)
        if part.finish is None:
            return events
        is_complete = part.finish == "stop"
        if is_complete and (self._open is None or isinstance(self._open, _ReasoningItem)):
            # Clients look for a message or a call.
            events += self._begin(_MessageItem(self._next))
        return events + self._end("completed" if is_complete else "incomplete")

    def _add(self, piece: Piece) -> list[JsonObject]:
        tokens = self._tokens
        self._tokens = []
        events: list[JsonObject] = []
        logprobs: list[JsonObject] = []
        match piece:
            case CallBegin(_, call_id, name):
                return self._begin(_CallItem(self._next, call_id, name))
            case Text():
                if not isinstance(self._open, _MessageItem):
                    events = self._begin(_MessageItem(self._next))
                logprobs = chat_logprobs(tokens, self._spelled)["content"]
            case Reasoning():
                if not isinstance(self._open, _ReasoningItem):
                    events = self._begin(_ReasoningItem(self._next))
            case CallArguments():
                pass
        if self._open is not None:
            events.append(self._open.grow(piece.text, logprobs))
        return events

    @property
    def _next(self) -> int:
        """Number of an item that begins now."""
        return len(self.items) + (self._open is not None)

    def _begin(self, item: _OutputItem) -> list[JsonObject]:
        events = self._end("completed")
        self._open = item
        return events + item.begin()

    def _end(self, status: str) -> list[JsonObject]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.items.append(self._open.item(status))
        self._open = None
        return events


class _OutputItem(ABC):
    """An item that grows with the answer.

    Attributes:
        id: of the item.
        text: so far: of a message or of reasoning, or the arguments of a call.

    Args:
        place: number of the item in the output.
    """

    prefix = ""
    # Name of the events of its text, and the member that has all of it at the end.
    event = ""
    member = "text"

    def __init__(self, place: int) -> None:
        self.id = f"{self.prefix}_{uuid4().hex}"
        self.text = ""
        self._place = place

    @abstractmethod
    def item(self, status: str) -> JsonObject:
        """Return the item as it is."""

    def begin(self) -> list[JsonObject]:
        return [{**self._head("output_item.added"), "item": self.item("in_progress")}]

    def grow(self, text: str, logprobs: list[JsonObject]) -> JsonObject:
        """Add text with its tokens' log-probabilities; return the event."""
        self.text += text
        return {**self._own(f"{self.event}.delta"), "delta": text}

    def end(self, status: str) -> list[JsonObject]:
        done = {**self._own(f"{self.event}.done"), self.member: self.text}
        return [done, {**self._head("output_item.done"), "item": self.item(status)}]

    def _head(self, kind: str) -> JsonObject:
        return {"type": f"response.{kind}", "output_index": self._place}

    def _own(self, kind: str) -> JsonObject:
        return {**self._head(kind), "item_id": self.id}


class _CallItem(_OutputItem):
    prefix = "fc"
    event = "function_call_arguments"
    member = "arguments"

    def __init__(self, place: int, call_id: str, name: str) -> None:
        super().__init__(place)
        self._call = {"call_id": call_id, "name": name}

    def item(self, status: str) -> JsonObject:
        return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": self.text}


class _TextItem(_OutputItem):
    """An item with a single part of text."""

    @abstractmethod
    def part(self) -> JsonObject:
        """Return the part as it is."""

    def begin(self) -> list[JsonObject]:
        return [*super().begin(), {**self._own("content_part.added"), "part": self.part()}]

    def end(self, status: str) -> list[JsonObject]:
        done, item = super().end(status)
        return [done, {**self._own("content_part.done"), "part": self.part()}, item]

    def content(self, status: str) -> list[JsonObject]:
        return [] if status == "in_progress" else [self.part()]

    def _own(self, kind: str) -> JsonObject:
        return {**super()._own(kind), "content_index": 0}


class _ReasoningItem(_TextItem):
    prefix = "rs"
    event = "reasoning_text"

    def part(self) -> JsonObject:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: str) -> JsonObject:
        content = self.content(status)
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _MessageItem(_TextItem):
    prefix = "msg"
    event = "output_text"

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self._logprobs: list[JsonObject] = []

    def part(self) -> JsonObject:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self._logprobs]}

    def item(self, status: str) -> JsonObject:
        content = self.content(status)
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def grow(self, text: str, logprobs: list[JsonObject]) -> JsonObject:
        self._logprobs += logprobs
        return {**super().grow(text, logprobs), "logprobs": logprobs}

    def end(self, status: str) -> list[JsonObject]:
        done, *others = super().end(status)
        return [{**done, "logprobs": [*self._logprobs]}, *others]
