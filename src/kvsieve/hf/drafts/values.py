"""Values that an answer copies from the conversation between words that repeat, such as a table's cells as JSON.

Words of the answer are found in the text before it, each near one found before. Where the answer repeats itself, the
value that follows is the text's next one: after the same separators as in the example, up to the same separator.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.hf.drafts.texts import TokenTexts

# Characters after a value within which the next one of its kind is looked for.
_NEAR = 200
# Newest values that may be the one before.
_RECENT = 20
# Places of a word that are compared at most.
_PLACES = 8
_WORD = re.compile(r"\w+")
_LEFT = re.compile(r"\W*\Z")
_RIGHT = re.compile(r"[^\S\n]*\W")
_GAP = re.compile(r"\W*")
_LAST = re.compile(r"\w*\Z")
_MOST_LEFT = 16


@dataclass
class Value:
    """A part of the answer that is also in the text before it.

    Attributes:
        place, end: its tokens in the conversation.
        head, tail: characters of these tokens in front of it and after it.
        start, stop: its characters in the text.
        before: number of the value that it followed in the text, or None.
    """

    place: int
    end: int
    head: str
    tail: str
    start: int
    stop: int
    before: int | None


class TemplateValues:
    """Values of an answer, and the next ones by an example.

    Args:
        texts: of the model's tokens.
        tokens: the conversation before the answer.
    """

    def __init__(self, texts: TokenTexts, tokens: Sequence[int]) -> None:
        self._texts = texts
        self._source = texts.text(tokens)
        self._begin = len(tokens)
        self._end = len(tokens)
        self._answer = ""
        # First character of each token of the answer, and the end.
        self._starts = [0]
        self._read = 0
        # In order, and their numbers by their first tokens.
        self._values: list[Value] = []
        self._numbers: dict[int, int] = {}
        self._ends: set[int] = set()
        self._fixed: set[int] = set()
        # The newest value's last token and last character, in the answer.
        self._token = 0
        self._last_end = 0

    def extend(self, tokens: Sequence[int], place: int, since: int) -> None:
        """Take in the conversation's tokens; those before are known.

        Args:
            tokens: of the conversation.
            place: of the answer, that is repeated next: where a value ends, the newest word ends too.
            since: tokens of the conversation when the place was reached: where a value begins, those since are of it.
        """
        self._end = len(tokens)
        for token in tokens[self._begin + len(self._starts) - 1 :]:
            self._answer += self._texts.of(token)
            self._starts.append(len(self._answer))
        until = self._starts[since - self._begin] if place in self._numbers else len(self._answer)
        for word in _WORD.finditer(self._answer, self._read):
            if word.start() >= until or (word.end() == len(self._answer) and place not in self._ends):
                break
            self._read = word.end()
            self._align(word.start(), word.end())

    def at(self, place: int, planned: Sequence[Value] = ()) -> int | None:
        """Return the number of the value that begins at a place of the answer, or None.

        planned: values expected after those known.
        """
        if place < self._end:
            return self._numbers.get(place)
        return next((len(self._values) + at for at, value in enumerate(planned) if value.place == place), None)

    def end(self, number: int, planned: Sequence[Value] = ()) -> int:
        """Return the place after a value."""
        return self._value(number, planned).end

    def next(self, number: int, planned: list[Value], place: int, typed: Sequence[int] = ()) -> list[int] | None:
        """Return tokens to expect instead of a value.

        Args:
            number: of the value, the example.
            planned: values expected already, in order; the new one is appended.
            place: of the new value.
            typed: tokens of the new value that the answer has already.

        Returns:
            The tokens after those; those of the example where no next value is known. None where `typed` fits no value.
        """
        example = self._value(number, planned)
        prefix = self._texts.join(typed)
        same: tuple[int, int, int | None] = example.start, example.stop, example.before
        found = None if example.start in self._fixed else self._following(number, planned, prefix[len(example.head) :])
        candidates = [same] if found is None else [found, same] if typed else [found]
        for start, stop, before in candidates:
            tokens = self._texts.split(example.head + self._source[start:stop] + example.tail)
            if tokens[: len(typed)] == list(typed):
                if len(tokens) == len(typed) and start == example.start:
                    # It does not change.
                    self._fixed.add(start)
                planned.append(Value(place, place + len(tokens), example.head, example.tail, start, stop, before))
                return tokens[len(typed) :]
        return None

    def _following(self, number: int, planned: list[Value], prefix: str) -> tuple[int, int, int | None] | None:
        """Return the characters of the value that follows by an example, and the number of the one before it."""
        source = self._source
        count = len(self._values) + len(planned)
        example = self._value(number, planned)
        left = _LEFT.search(source, max(0, example.start - _MOST_LEFT), example.start)
        right = _RIGHT.match(source, example.stop)
        # Words between spaces are no values.
        if not (left and right and left[0].strip(" ") and right[0].strip(" ")):
            return None
        skipped = 1
        if example.before is not None:
            before = count - (number - example.before)
            skipped = max(1, source.count(left[0], self._value(example.before, planned).stop, example.start))
            lines = self._crosses(example, planned)
        else:
            # The last one that followed the example, and those after it.
            before = number
            lines = False
            for later in range(number + 1, count):
                value = self._value(later, planned)
                if value.before == before:
                    before = later
                    lines = lines or self._crosses(value, planned)
        at = self._value(before, planned).stop
        separator = left[0]
        if example.before is None and separator not in self._source[at : at + _NEAR].partition("\n")[0]:
            follows = _GAP.match(self._source, at)
            if follows and separator != follows[0] and "\n" not in follows[0]:
                separator = follows[0]
        for _ in range(skipped):
            found = self._source.find(separator, at, at + _NEAR)
            if found < 0 or (not lines and "\n" in self._source[at:found]):
                return None
            at = found + len(separator)
        if not self._source.startswith(prefix, at):
            at = self._source.find(left[0] + prefix, at) + len(left[0])
            if at < len(left[0]):
                return None
        stop = self._source.find(right[0], at, at + _NEAR)
        if stop <= at or "\n" in self._source[at:stop]:
            return None
        return at, stop, before

    def _value(self, number: int, planned: Sequence[Value]) -> Value:
        known = len(self._values)
        return self._values[number] if number < known else planned[number - known]

    def _crosses(self, value: Value, planned: Sequence[Value]) -> bool:
        """Return True if the text between a value and the one before it has lines of other words."""
        assert value.before is not None
        gap = self._source[self._value(value.before, planned).stop : value.start]
        return "\n" in gap and _WORD.search(gap) is not None

    def _align(self, start: int, end: int) -> None:
        """Find a word of the answer in the text before it, by the word's characters in the answer."""
        word = self._answer[start:end]
        values = self._values
        if values:
            last = values[-1]
            gap = self._answer[self._last_end : start]
            if len(gap) < 3 and "\n" not in gap and self._continues(gap + word, last.stop):
                self._last_end = end
                last.stop += len(gap + word)
                self._cover(last, end)
                return
        before = None
        nearest = _NEAR
        for number in reversed(range(max(0, len(values) - _RECENT), len(values))):
            stop = values[number].stop
            found = self._find(word, stop, stop + nearest + len(word))
            if found >= 0 and found - stop < nearest:
                nearest = found - stop
                before = number
        found = self._find(word, 0, len(self._source)) if before is None else values[before].stop + nearest
        if found < 0:
            return
        while self._starts[self._token + 1] <= start:
            self._token += 1
        place = self._begin + self._token
        if values and place < values[-1].end:
            return
        self._last_end = end
        self._numbers[place] = len(values)
        head = self._answer[self._starts[self._token] : start]
        values.append(Value(place, place, head, "", found, found + len(word), before))
        self._cover(values[-1], end)

    def begun(self, tokens: Sequence[int]) -> list[int]:
        """Return the rest of the value that the answer has begun, if it follows one of the newest values.

        tokens: of the conversation.
        """
        word = _LAST.search(self._answer, self._last_end)
        if not (word and word[0]):
            return []
        token = bisect.bisect_right(self._starts, word.start()) - 1
        head = self._answer[self._starts[token] : word.start()]
        begun = tokens[self._begin + token :]
        followed = set[int | None]()
        for number in reversed(range(max(0, len(self._values) - _RECENT), len(self._values))):
            value = self._values[number]
            gap = _GAP.match(self._source, value.stop)
            right = _RIGHT.match(self._source, value.stop)
            if number not in followed and gap and right and self._source.startswith(word[0], gap.end()):
                stop = self._source.find(right[0], gap.end(), gap.end() + _NEAR)
                found = self._texts.split(head + self._source[gap.end() : max(stop, 0)])
                if found[: len(begun)] == begun:
                    return found[len(begun) :]
            followed.add(value.before)
        return []

    def _cover(self, value: Value, end: int) -> None:
        """Let a value end at a character of the answer."""
        while self._starts[self._token + 1] < end:
            self._token += 1
        value.end = self._begin + self._token + 1
        self._ends.add(value.end)
        value.tail = self._answer[end : self._starts[self._token + 1]]

    def _find(self, word: str, start: int, end: int) -> int:
        """Return the first place of a whole word between two characters of the text, or -1."""
        for _ in range(_PLACES):
            start = self._source.find(word, start, end)
            within = start > 0 and _WORD.match(self._source, start - 1, start)
            if start < 0 or (not within and self._ends_word(start + len(word))):
                return start
            start += 1
        return -1

    def _continues(self, text: str, at: int) -> bool:
        return self._source.startswith(text, at) and self._ends_word(at + len(text))

    def _ends_word(self, end: int) -> bool:
        """Return True if no word continues at a character of the text."""
        return not _WORD.match(self._source, end, end + 1)
