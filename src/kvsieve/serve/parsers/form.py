"""The contract of a form: how a chat template writes tool calls, and a parser of answers in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvsieve.serve.pieces import Piece, Text


class AnswerParser(ABC):
    """Splits an answer into pieces while its text arrives. A whole answer is parsed by the same calls."""

    @abstractmethod
    def add(self, text: str, last: bool = False) -> list[Piece]:
        """Return the pieces that are final, in order; what may be part of a call is held until that is known.

        Args:
            text: the next text of the answer; may be empty.
            last: the answer has ended, and everything held is final.
        """


class PlainParser(AnswerParser):
    """Parser of answers that are text alone."""

    def add(self, text: str, last: bool = False) -> list[Piece]:
        return [Text(text)] if text else []


class CallForm(ABC):
    """The form in which a chat template writes tool calls.

    Attributes:
        controls: control tokens of the form, which are shown in the answer's text for the parser.
    """

    controls: tuple[str, ...] = ()

    @abstractmethod
    def parser(self) -> AnswerParser:
        """Return the parser of a new answer."""


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is split into pieces.

    Attributes:
        calls: form of its tool calls; None for text alone.
    """

    calls: CallForm | None = None

    @property
    def controls(self) -> tuple[str, ...]:
        """Control tokens that are shown in the answer's text."""
        return () if self.calls is None else self.calls.controls

    def parser(self) -> AnswerParser:
        """Return the parser of a new answer."""
        return PlainParser() if self.calls is None else self.calls.parser()
