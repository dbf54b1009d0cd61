"""Pieces of an answer, as every protocol sends them: text, reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Text:
    """Text of the answer that its reader sees."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning, before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """Begin of a tool call.

    Attributes:
        call: number of the call in the answer, from 0.
        id: of the call.
        name: of the function.
    """

    call: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """Part of the arguments of the call begun last, as JSON text."""

    call: int
    text: str


Piece = Text | Reasoning | CallBegin | CallArguments


def new_id() -> str:
    """Return a call's id of nine letters and digits, the only ones that some templates accept."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass
class Call:
    """A tool call of an answer. arguments: as JSON text."""

    id: str
    name: str
    arguments: str = ""


class WholeAnswer:
    """An answer put together from its pieces.

    Attributes:
        text: without reasoning and calls.
        reasoning: of the model; "" for none.
        calls: in order.
    """

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.text = self.reasoning = ""
        self.calls: list[Call] = []
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                self.text += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegin(_, call_id, name):
                self.calls.append(Call(call_id, name))
            case CallArguments(call, text):
                self.calls[call].arguments += text


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with neighbours of the same kind joined."""
    out: list[Piece] = []
    for piece in pieces:
        match out[-1] if out else None, piece:
            case Text(before), Text(text):
                out[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                out[-1] = Reasoning(before + text)
            case CallArguments(one, before), CallArguments(other, text) if one == other:
                out[-1] = CallArguments(one, before + text)
            case _:
                out.append(piece)
    return out
