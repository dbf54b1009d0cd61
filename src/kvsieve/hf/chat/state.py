"""The state of a chat, and its answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve.hf.cache.snapshot import Snapshot
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
class Transcript:
    """A conversation's messages and ids.

    Attributes:
        ids: int64 [1, N], all that was fed or generated.
        messages: all messages.
        turns: the statistics of every turn.
        context: the next user message's text so far, fed already.
        ended: True if the last id ends an answer, and is not processed yet.
    """

    ids: Tensor
    messages: tuple[Message, ...]
    turns: tuple[Stats, ...] = ()
    context: str | None = None
    ended: bool = False


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
    }


def from_saved(form: dict[str, Any], ids: Tensor) -> Transcript:
    """Return the inverse of `saved_form`, with the ids that were saved beside it."""
    messages = tuple({name: _text(message[name]) for name in ("role", "content")} for message in form["messages"])
    context = None if form["context"] is None else _text(form["context"])
    return Transcript(ids, messages, tuple(map(_stats, form["turns"])), context, bool(form["ended"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got a {type(value).__name__}")
    return value


def _stats(data: dict[str, Any]) -> Stats:
    """Return the inverse of Stats.to_dict."""
    parts: dict[str, Any] = {"traffic": Traffic, "storage": Storage, "decoding": Decoding}
    parts |= {"drafts": DraftCounts, "edited": EditedEntries}
    return Stats(**{name: parts[name](**part) if part and name in parts else part for name, part in data.items()})
