"""The contract of a form: how a chat template writes tool calls and reasoning, and a parser of answers in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.serve.parsers.lark import Rules
from kvsieve.serve.pieces import CallArguments, CallBegin, Piece, Text

# Tools in the form of chat templates.
Tools = Sequence[Mapping[str, Any]]


class AnswerParser(ABC):
    """Splits an answer into pieces while its text arrives. A whole answer is parsed by the same calls."""

    @abstractmethod
    def add(self, text: str, last: bool = False) -> list[Piece]:
        """Return the pieces that are final, in order; text that may begin a mark waits until that is known.

        Args:
            text: the next text of the answer; may be empty.
            last: the answer has ended, so all of its text is final.
        """


class PlainParser(AnswerParser):
    """Parser of answers that are text alone."""

    def add(self, text: str, last: bool = False) -> list[Piece]:
        return [Text(text)] if text else []


class CallForm(ABC):
    """The form in which a chat template writes tool calls."""

    @property
    def controls(self) -> tuple[str, ...]:
        """Control tokens of the form, which are shown in the answer's text for the parser."""
        return ()

    @abstractmethod
    def parser(self) -> AnswerParser:
        """Return the parser of a new answer."""

    @abstractmethod
    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        """Return the expression of an answer that calls tools, and add its rules.

        Args:
            rules: of the grammar.
            tools: that may be called, at least one.
            several: allow more than one call, where the form has that.
        """

    def text(self, rules: Rules, symbol: str) -> str:
        """Return the expression of an answer that is a symbol and no call."""
        return symbol


@dataclass(frozen=True)
class ReasoningTokens:
    """Tokens of the marks around reasoning.

    Attributes:
        begin: before it; None if the prompt ends with that.
        end: after it.
    """

    begin: int | None
    end: int

    def count(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of an answer are reasoning, marks included."""
        if self.begin is not None and self.begin not in tokens:
            return 0
        return tokens.index(self.end) + 1 if self.end in tokens else len(tokens)


class ReasoningForm(ABC):
    """The form in which a chat template writes reasoning before the answer."""

    @property
    def controls(self) -> tuple[str, ...]:
        """Control tokens of the form, which are shown in the answer's text for the parser."""
        return ()

    @abstractmethod
    def parser(self, behind: AnswerParser) -> AnswerParser:
        """Return the parser of a new answer, which gives the text after the reasoning to another one."""

    @abstractmethod
    def before(self, rules: Rules, answer: str) -> str:
        """Return the expression of reasoning and an answer. answer: the expression of an answer."""

    def tokens(self, controls: Mapping[str, int]) -> ReasoningTokens | None:
        """Return the tokens of the marks; None if a mark is not one token. controls: ids of added tokens, by text."""
        return None


@dataclass(frozen=True)
class AnswerForm:
    """Form of an answer, by which it is split into pieces.

    Attributes:
        calls: form of its tool calls; None for text alone.
        reasoning: form of the reasoning before the answer; None for none.
        single: drop all calls but the first.
        named: a tool was forced by name, so that a call does not change the finish reason.
    """

    calls: CallForm | None = None
    reasoning: ReasoningForm | None = None
    single: bool = False
    named: bool = False

    @property
    def controls(self) -> tuple[str, ...]:
        """Control tokens that are shown in the answer's text."""
        own = () if self.calls is None else self.calls.controls
        return own if self.reasoning is None else (*self.reasoning.controls, *own)

    def parser(self) -> AnswerParser:
        """Return the parser of a new answer."""
        parser: AnswerParser = PlainParser() if self.calls is None else self.calls.parser()
        if self.reasoning is not None:
            parser = self.reasoning.parser(parser)
        return _FirstCall(parser) if self.single else parser

    def finish(self, end: str, calls: bool) -> str:
        """Return the finish reason in OpenAI's words.

        Args:
            end: why the answer ended, "stop" or "length".
            calls: the answer has calls.
        """
        return "tool_calls" if calls and end == "stop" and not self.named else end

    def forced_calls(self, controls: Mapping[str, int], tools: Tools) -> str:
        """Return the grammar, in llguidance's Lark syntax, of an answer that calls at least one of some tools.

        Reasoning is free, and the calls follow its end.

        Args:
            controls: ids of the tokenizer's added tokens, by their text.
            tools: that may be called, at least one.

        Raises:
            ValueError: the form has no calls.
        """
        if self.calls is None:
            raise ValueError("the form has no calls")
        rules = Rules(controls)
        answer = self.calls.forced(rules, tools, not (self.single or self.named))
        return self._grammar(rules, answer)

    def matching(self, controls: Mapping[str, int], symbol: str, tools: Tools) -> str:
        """Return the grammar, in llguidance's Lark syntax, of an answer that is a symbol, or calls tools.

        Reasoning is free, and the answer follows its end.

        Args:
            controls: ids of the tokenizer's added tokens, by their text.
            symbol: of the grammar.
            tools: that may be called.
        """
        rules = Rules(controls)
        answer = symbol
        if self.calls is not None:
            answer = self.calls.text(rules, symbol)
            if tools:
                answer = rules.any_of([self.calls.forced(rules, tools, not self.single), answer])
        return self._grammar(rules, answer)

    def _grammar(self, rules: Rules, answer: str) -> str:
        return rules.grammar(answer if self.reasoning is None else self.reasoning.before(rules, answer))


class _FirstCall(AnswerParser):
    """Parser that drops all calls but the first."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def add(self, text: str, last: bool = False) -> list[Piece]:
        pieces = self._parser.add(text, last)
        return [piece for piece in pieces if not isinstance(piece, CallBegin | CallArguments) or piece.call == 0]
