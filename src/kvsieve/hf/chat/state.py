"""The state of a chat, and its answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.cache.snapshot import Snapshot
from kvsieve.hf.chat.edits import first_turn
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.hf.generate.edited import EditedEntries
from kvsieve.hf.generate.stats import Decoding, Stats, Storage, Traffic
from kvsieve.planning.turns import Message


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        text: all pieces given to on_text, without special tokens.
        tokens: the generated ids, including the end token.
        ended: True if the model ended its answer itself, False if it was cut.
        stats: of this turn's generate call; stats.notes say where the context cut the answer.
    """

    text: str
    tokens: list[int] = dataclasses.field(repr=False)
    ended: bool
    stats: Stats


@dataclass(frozen=True)
class FedTurn:
    """A turn of a conversation.

    Attributes:
        number: from 0.
        message: of the user or a tool.
        answer: to it.
        fed: int64 [1, N], tokens up to the answer; none if unknown.
        said: int64 [1, M], tokens of the answer, its end token included.
    """

    number: int
    message: Message
    answer: Message
    fed: Tensor
    said: Tensor

    @property
    def is_known(self) -> bool:
        return self.fed.shape[1] > 0


@dataclass(frozen=True)
class Transcript:
    """A conversation's messages and ids.

    Attributes:
        ids: int64 [1, N], all that was fed or generated.
        messages: all messages.
        turns: the statistics of every turn.
        context: the next user message's text so far, fed already.
        ended: True if the last id ends an answer, and is not processed yet.
        sizes: per turn, tokens up to its answer, and of the answer; () if unknown.
    """

    ids: Tensor
    messages: tuple[Message, ...]
    turns: tuple[Stats, ...] = ()
    context: str | None = None
    ended: bool = False
    sizes: tuple[tuple[int, int], ...] = ()

    def sizes_in(self, ids: Tensor) -> tuple[tuple[int, int], ...]:
        """Return `sizes` for int64 [1, N] that continue `ids`, perhaps with another end of the last answer."""
        end = sum(map(sum, self.sizes))
        if not end or torch.equal(self.ids[0, end - 1], ids[0, end - 1]):
            return self.sizes
        fed, said = self.sizes[-1]
        return (*self.sizes[:-1], (fed, said - 1))

    def sizes_after(self, ids: Tensor, said: int) -> tuple[tuple[int, int], ...]:
        """Return `sizes` with a further turn: ids int64 [1, N] up to its answer, which has `said` tokens."""
        if len(self.sizes) < sum(message["role"] == "assistant" for message in self.messages):
            return ()
        sizes = self.sizes_in(ids)
        return (*sizes, (ids.shape[1] - sum(map(sum, sizes)), said))

    def fed_turns(self) -> list[FedTurn]:
        """Return the tokens of every turn, all of which have answers."""
        at = first_turn(self.messages)
        start = 0
        turns = []
        for number, (fed, said) in enumerate(self.sizes or ((0, 0),) * len(self.turns)):
            parts = self.ids[:, start : start + fed + said].split([fed, said], 1)
            turns.append(FedTurn(number, self.messages[at + 2 * number], self.messages[at + 2 * number + 1], *parts))
            start += fed + said
        return turns


@dataclass(frozen=True)
class ChatState:
    """The whole state of a chat, replaced by one assignment per turn.

    Attributes:
        transcript: messages and ids.
        cache: state of the cache.
        before: state at the beginning of the last turn, for `Chat.retry`, or None.
    """

    transcript: Transcript
    cache: Snapshot
    before: ChatState | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ChatSnapshot:
    """A chat at one moment; see Chat.snapshot."""

    state: ChatState


def saved_form(transcript: Transcript) -> dict[str, Any]:
    """Return a conversation as JSON, without its ids."""
    return {
        "messages": list(transcript.messages),
        "turns": [stats.to_dict() for stats in transcript.turns],
        "context": transcript.context,
        "ended": transcript.ended,
        "sizes": [*transcript.sizes],
    }


def from_saved(form: dict[str, Any], ids: Tensor) -> Transcript:
    """Return the inverse of `saved_form`, with the ids that were saved beside it."""
    messages = tuple({name: _text(message[name]) for name in ("role", "content")} for message in form["messages"])
    context = None if form["context"] is None else _text(form["context"])
    turns = tuple(map(_stats, form["turns"]))
    sizes = tuple((int(fed), int(said)) for fed, said in form.get("sizes", ()))
    return Transcript(ids, messages, turns, context, bool(form["ended"]), sizes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got a {type(value).__name__}")
    return value


def _stats(data: dict[str, Any]) -> Stats:
    """Return the inverse of Stats.to_dict."""
    parts: dict[str, Any] = {"traffic": Traffic, "storage": Storage, "decoding": Decoding}
    parts |= {"drafts": DraftCounts, "edited": EditedEntries}
    return Stats(**{name: parts[name](**part) if part and name in parts else part for name, part in data.items()})
