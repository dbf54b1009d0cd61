"""Parsers as steps: each takes text that has arrived, or waits for more."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from kvsieve.serve.parsers.form import AnswerParser
from kvsieve.serve.parsers.json_text import JsonEnd
from kvsieve.serve.pieces import CallArguments, CallBegin, Piece, Text, merged, new_id

# Pieces that are final; None if more text is needed.
Step = Callable[[], list[Piece] | None]
# Characters between the mark of a call and its arguments, at most.
_LONGEST = 400


def held_back(text: str, marks: Collection[str]) -> int:
    """Return how many of the last characters of a text may begin one of some marks."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Return the place of the first of some marks in a text, and the mark; None for none of them."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


class CallParser(AnswerParser):
    """Parser of text with calls that begin with marks.

    White space around calls is dropped. Other text is returned at once, except a possible begin of a mark.

    Attributes:
        marks: that begin a call.
        ends: that may follow a call.
        held: buffer of text that no step has taken.
        last: the answer has ended.
        step: the next one.
    """

    marks: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.held = ""
        self.last = False
        self.step: Step = self.text
        self._json = JsonEnd()
        self._calls = 0
        self._space = ""
        self._behind_call = False

    def add(self, text: str, last: bool = False) -> list[Piece]:
        self.held += text
        self.last = last
        pieces: list[Piece] = []
        while (found := self.step()) is not None:
            pieces += found
        return merged(pieces)

    def call(self) -> list[Piece] | None:
        """Begin the call with the mark at the begin of the buffer."""
        raise NotImplementedError

    def text(self) -> list[Piece] | None:
        """Return text up to a mark."""
        found = first_of(self.held, self.marks)
        if found is not None:
            self.step = self.call
            return self.said(found[0])
        keep = 0 if self.last else held_back(self.held, self.marks)
        return self.said(len(self.held) - keep, end=self.last) or None

    def said(self, size: int, end: bool = False) -> list[Piece]:
        """Take text of the answer.

        Args:
            size: characters of the buffer.
            end: the answer ends with it.
        """
        text = self._space + self._taken(size)
        text = text.lstrip() if self._behind_call else text
        bare = text if end else text.rstrip()
        self._space = text[len(bare) :]
        self._behind_call = self._behind_call and not bare
        return [Text(bare)] if bare else []

    def no_call(self, size: int) -> list[Piece]:
        """Take a mark, or another begin of a call, as text. A mark at the end of the answer is dropped."""
        self.step = self.text
        if self.last and size > 1 and not self.held[size:].strip():
            self.held = ""
            return []
        return self.said(size)

    def begin(self, name: str, size: int, call_id: str | None = None) -> list[Piece]:
        """Begin a call. size: characters of the buffer before its arguments."""
        self._taken(size)
        self._space = ""
        self._behind_call = True
        self._calls += 1
        return [CallBegin(self._calls - 1, call_id or new_id(), name)]

    def arguments(self, text: str) -> list[Piece]:
        """Return a part of the arguments of the call that was begun last."""
        return [CallArguments(self._calls - 1, text)] if text else []

    def named(self, mark: str, head: re.Pattern[str]) -> list[Piece] | None:
        """Begin a call with a name between its mark and its arguments, an object.

        Args:
            mark: begin of the buffer, which is text if no call follows.
            head: of a call up to its arguments, with the groups `name` and, where models write ids of calls, `id`.
        """
        begun, brace, _ = self.held.partition("{")
        if not brace and not self.last and len(begun) <= _LONGEST:
            return None
        found = head.fullmatch(begun) if brace else None
        if found is None:
            return self.no_call(len(mark))
        return self.json_arguments(self.begin(found["name"], len(begun), found.groupdict().get("id")))

    def json_arguments(self, begun: list[Piece]) -> list[Piece]:
        """Continue with arguments that are the JSON value which comes next. begun: pieces of the call so far."""
        self._json = JsonEnd()
        self.step = self.value
        return begun

    def value(self) -> list[Piece] | None:
        """Return arguments while they arrive, and continue after them."""
        size = self._json.take(self.held)
        pieces = self.arguments(self._taken(size))
        if self._json.ended:
            self.step = self.behind
            return pieces
        return pieces or None

    def behind(self) -> list[Piece] | None:
        """Drop the marks that follow a call, and continue with text."""
        if not self.skip(self.ends):
            return None
        self.step = self.text
        return []

    def skip(self, marks: Collection[str]) -> bool:
        """Drop white space and marks. Return whether other text follows, or none."""
        while True:
            self.held = self.held.lstrip()
            mark = next((mark for mark in marks if self.held.startswith(mark)), None)
            if mark is None:
                return self.last or (bool(self.held) and not any(mark.startswith(self.held) for mark in marks))
            self._taken(len(mark))

    def _taken(self, size: int) -> str:
        text = self.held[:size]
        self.held = self.held[size:]
        return text


class NamedParser(CallParser):
    """Parser of calls with a name between marks, before their arguments.

    Args:
        mark: that begins a call.
        head: of a call; see CallParser.named.
        ends: marks that may follow a call.
        section: mark before all calls; "" for none.
    """

    def __init__(self, mark: str, head: re.Pattern[str], ends: tuple[str, ...], section: str = "") -> None:
        super().__init__()
        self.marks = (section, mark) if section else (mark,)
        self.ends = ends
        self._mark = mark
        self._head = head
        self._section = section

    def call(self) -> list[Piece] | None:
        if not self._section or not self.held.startswith(self._section):
            return self.named(self._mark, self._head)
        size = len(self._section)
        behind = self.held[size:].lstrip()
        following = (self._mark, *self.ends)
        if behind.startswith(following):
            self._taken(len(self.held) - len(behind))
            self.step = self.call if behind.startswith(self._mark) else self.behind
            return []
        if not self.last and any(mark.startswith(behind) for mark in following):
            return None
        return self.no_call(size)
