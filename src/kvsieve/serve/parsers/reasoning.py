"""Reasoning between marks, before the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvsieve.serve.parsers.form import AnswerParser, ReasoningForm, ReasoningTokens
from kvsieve.serve.parsers.lark import Rules
from kvsieve.serve.parsers.steps import held_back
from kvsieve.serve.pieces import Piece, Reasoning, merged


@dataclass(frozen=True)
class MarkedReasoning(ReasoningForm):
    """Reasoning between two marks at the begin of an answer.

    Attributes:
        begin: mark before it.
        end: mark after it.
        opened: the prompt ends with `begin`.
    """

    begin: str
    end: str
    opened: bool = False

    @property
    def controls(self) -> tuple[str, ...]:
        # Words may follow the control token of a mark.
        return (re.split(r"(?<=>)", self.begin, maxsplit=1)[0], self.end)

    def after(self, prompt: str) -> MarkedReasoning | None:
        """Return the form of an answer to a prompt, which may have opened the reasoning, or closed it: None."""
        text = prompt.rstrip()
        return None if text.endswith(self.end) else replace(self, opened=text.endswith(self.begin.rstrip()))

    def parser(self, behind: AnswerParser) -> AnswerParser:
        return _ReasoningParser(self, behind)

    def before(self, rules: Rules, answer: str) -> str:
        reasoning = f"{rules.until(self.end)} (/\\n+/)?"
        if self.opened:
            return f"{reasoning} {answer}"
        return f"((/\\n+/)? {rules.text(self.begin)} {reasoning})? {answer}"

    def tokens(self, controls: Mapping[str, int]) -> ReasoningTokens | None:
        begin = controls.get(self.controls[0])
        end = controls.get(self.end)
        return None if begin is None or end is None else ReasoningTokens(None if self.opened else begin, end)


# Pairs of marks in public templates. Gemma 4's is a control token and a word.
MARKS = (
    MarkedReasoning("<think>", "</think>"),
    MarkedReasoning("[THINK]", "[/THINK]"),
    MarkedReasoning("<|channel>thought\n", "<channel|>"),
    MarkedReasoning("◁think▷", "◁/think▷"),
    MarkedReasoning("<seed:think>", "</seed:think>"),
)


class _ReasoningParser(AnswerParser):
    """Parser of reasoning, and of the answer by another parser.

    White space at the begin and at the end of the reasoning, and before the answer, is dropped.
    """

    def __init__(self, form: MarkedReasoning, behind: AnswerParser) -> None:
        self._form = form
        self._behind = behind
        self._held = ""
        self._state = "reasoning" if form.opened else "start"
        self._empty = True

    def add(self, text: str, last: bool = False) -> list[Piece]:
        self._held += text
        if self._state == "start":
            self._start(last)
        pieces: list[Piece] = self._reasoning(last) if self._state == "reasoning" else []
        if self._state == "space":
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "space"
        if self._state == "answer" or last:
            held = self._held
            self._held = ""
            pieces += self._behind.add(held, last)
        return merged(pieces)

    def _start(self, last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._form.begin):
            self._held = begun[len(self._form.begin) :]
            self._state = "reasoning"
        elif last or not self._form.begin.startswith(begun):
            self._state = "answer"

    def _reasoning(self, last: bool) -> list[Piece]:
        if self._empty:
            self._held = self._held.lstrip()
        text, found, rest = self._held.partition(self._form.end)
        if found:
            self._held = rest
            self._state = "space"
            return [Reasoning(bare)] if (bare := text.rstrip()) else []
        size = len(text) - held_back(text, (self._form.end,))
        said = text[:size].rstrip()
        self._held = "" if last else text[len(said) :]
        said = text.rstrip() if last else said
        self._empty = self._empty and not said
        return [Reasoning(said)] if said else []
