"""Answers in gpt-oss' harmony: messages in channels, with reasoning, calls and the answer itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.lark import Rules, parameters_of
from kvsieve.serve.parsers.steps import CallParser, first_of, held_back
from kvsieve.serve.pieces import Piece, Reasoning, Text

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_MARKS = (_START, _CHANNEL, "to=", *_ENDS)
# Characters of a header, at most.
_LONGEST = 400


@dataclass(frozen=True)
class HarmonyCalls(CallForm):
    """Messages in channels. The channel `analysis` is reasoning; messages to functions are calls; others are text.

    Attributes:
        names: of functions that may be called; messages to others are text.
    """

    names: frozenset[str] = frozenset()
    controls = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def parser(self) -> AnswerParser:
        return _HarmonyParser(self.names)

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        calls = []
        for tool in tools:
            name = tool["function"]["name"]
            to = rules.text(f"{_CHANNEL}commentary to={_FUNCTIONS}{name} {_CONSTRAIN}json{_MESSAGE}")
            calls.append(rules.rule(f"{to} {rules.json(parameters_of(tool))}"))
        return f"{self._reasoning(rules)} {rules.any_of(calls)}"

    def text(self, rules: Rules, symbol: str) -> str:
        return f"{self._reasoning(rules)} {rules.text(f'{_CHANNEL}final{_MESSAGE}')} {symbol}"

    def _reasoning(self, rules: Rules) -> str:
        head = rules.text(f"{_CHANNEL}analysis{_MESSAGE}")
        return f"({head} {rules.until(_ENDS[0])} {rules.text(_START + 'assistant')})?"


class _HarmonyParser(CallParser):
    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._kind = "text"
        self.step = self.header

    def header(self) -> list[Piece] | None:
        """Read a message's channel and recipient."""
        begun = self.held.lstrip()
        mark = next((mark for mark in _MARKS if begun.startswith(mark)), None)
        if mark is None:
            if not self.last and any(mark.startswith(begun) for mark in _MARKS):
                return None
            return self._text(0)
        space = len(self.held) - len(begun)
        if mark in _ENDS:
            self._taken(space + len(mark))
            return []
        head, found, rest = begun.partition(_MESSAGE)
        if not found:
            if self.last:
                # A header that is cut off has no text.
                self.held = ""
            return self._text(space + len(mark)) if len(head) > _LONGEST else None
        self.held = rest
        self.step = self.body
        channel = _NAME.search(head)
        to = _TO.search(head)
        name = to[1].removeprefix(_FUNCTIONS) if to else ""
        if name in self._names:
            self._kind = "call"
            return self.begin(name, 0)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        return []

    def _text(self, size: int) -> list[Piece]:
        """Take text that is no header. size: characters that are text even if they spell a mark."""
        self._kind = "text"
        self.step = self.body
        return self._pieces(self._taken(size))

    def body(self) -> list[Piece] | None:
        """Return a message's text while it arrives."""
        marks = (*_ENDS, _START, _CHANNEL)
        found = first_of(self.held, marks)
        if found is None:
            keep = 0 if self.last and self._kind != "call" else held_back(self.held, marks)
            pieces = self._pieces(self._taken(len(self.held) - keep))
            # A mark that is cut off is no part of a call.
            self.held = "" if self.last else self.held
            return pieces or None
        text = self._taken(found[0])
        self.step = self.header
        return self._pieces(text)

    def _pieces(self, text: str) -> list[Piece]:
        if self._kind == "call":
            return self.arguments(text)
        if not text:
            return []
        return [Reasoning(text) if self._kind == "reasoning" else Text(text)]
