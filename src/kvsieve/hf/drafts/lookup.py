"""Drafts copied from the conversation: what followed the last place that ended as it ends now.

All tokens are searched as they were given, those included that a plan has evicted or that never reached the deeper
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsieve.hf.drafts.drafter import Drafter
from kvsieve.hf.drafts.edits import Edits
from kvsieve.hf.drafts.texts import TokenTexts
from kvsieve.hf.drafts.values import TemplateValues, Value

# Earlier places compared for the longest match, newest first.
_PLACES = 32
# Tokens compared of each.
_LONGEST = 64
# Least match of each class above the first three, in tokens.
_CLASSES = (4, 6, 10, 20, 40)
# Classes of places behind an edit: assumed, and found by a token.
_ASSUMED, _FOUND = 0, 1
# Least match that counts as a copy, in which tokens may be replaced.
_COPY = 8
# Places where the conversation left an earlier text that it may go back to, tokens looked through behind each, and
# tokens of the conversation until it is forgotten.
_LEFT, _BEHIND, _FORGOTTEN = 4, 12, 24
# Most tokens that count as matched where a text continues.
_RESUMED = 9
# Shorter matches say less than a value that the answer has begun.
_SHORT = 4


class LookupDrafter(Drafter):
    """Finds the longest earlier match of the conversation's end, and proposes what followed it.

    A match that goes on is followed, one step per token; after one that ends, places of the last n-gram are compared.
    The conversation may also go back to a text that it has just left, for a value that differs or an edit: the newest
    token is looked for behind these places. With a tokenizer, an edit of a copy is expected again at the same word, and
    a value in repeated text is expected to be the next one of the text that it comes from.

    Args:
        ngram: least tokens of a match.
        tokenizer: the model's; None to compare tokens only.
    """

    def __init__(self, ngram: int = 2, tokenizer: Any = None) -> None:
        self.ngram = ngram
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._tokens: list[int] = []
        # Last place behind each n-gram, and for each place the one before it with the same n-gram.
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []
        # Place of the match, length of the conversation when it was reached, and tokens that matched.
        self._at = 0
        self._since = 0
        self._length = 0
        self._class = _ASSUMED
        # Tokens expected next, each with the match's place after it.
        self._plan: list[tuple[int, int]] = []
        # Places that the conversation left, its length then, and the tokens that had matched; newest last.
        self._left: list[tuple[int, int, int]] = []
        # Tokens before the answer, its edits of them, and the values it takes from them.
        self._given: int | None = None
        self._edits = None if self._texts is None else Edits(self._texts)
        self._values: TemplateValues | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        self._tokens += tokens
        size = self.ngram
        everything = self._tokens
        if self._given is None:
            self._given = len(everything)
        # The last n-gram is put in with the next token: a match is an earlier place.
        for end in range(known, len(everything)):
            self._follow(end)
            if end >= size:
                gram = tuple(everything[end - size : end])
                self._before.append(self._last.get(gram, 0))
                self._last[gram] = end
            else:
                self._before.append(0)

    def propose(self, most: int) -> list[int]:
        self._plan = self._planned(most + 1) if self._length >= self.ngram else []
        for find in (self._resume, self._search, self._go_back):
            if not self._plan and find():
                self._plan = self._planned(most + 1)
        if self._length < _SHORT and (values := self._answer_values()) is not None:
            rest = values.begun(self._tokens)
            if rest:
                self._length = 0
                self._class = _FOUND
                return rest[:most]
        return [token for token, _ in self._plan[:most]]

    @property
    def confidence(self) -> int:
        if self._length < self.ngram:
            return self._class
        return 2 + sum(self._length >= least for least in _CLASSES)

    def _planned(self, most: int) -> list[tuple[int, int]]:
        """Return tokens that follow by the match, and its place after each; none if another value has begun."""
        tokens = self._tokens
        end = len(tokens)
        place = self._at
        values = self._values_at(place)
        planned: list[Value] = []
        plan: list[tuple[int, int]] = []
        while len(plan) < most:
            new: list[int] | None = None
            behind = place + 1
            number = None if values is None else values.at(place, planned)
            if values is not None and number is not None:
                behind = values.end(number, planned)
                begun = [] if plan else tokens[self._since :]
                new = values.next(number, planned, end + len(plan) - len(begun), begun)
                if new is None:
                    self._leave(behind, self._since)
                    return []
            elif values is None and self._edits is not None and place < end:
                new, behind = self._edits.at(tokens, place)
            if new is None:
                # A match that reaches the end repeats itself.
                if place - end >= len(plan):
                    break
                new = [tokens[place] if place < end else plan[place - end][0]]
            plan += [(token, place) for token in new[:-1]]
            plan += [(token, behind) for token in new[-1:]]
            place = behind
        return plan[:most]

    def _values_at(self, place: int) -> TemplateValues | None:
        """Return the answer's values if a place is in the answer."""
        return self._answer_values() if place >= (self._given or 0) else None

    def _answer_values(self) -> TemplateValues | None:
        """Return the answer's values so far, None without a tokenizer."""
        if self._texts is None:
            return None
        if self._values is None:
            self._values = TemplateValues(self._texts, self._tokens[: self._given])
        self._values.extend(self._tokens, self._at, self._since)
        return self._values

    def _follow(self, end: int) -> None:
        """Go on with the match by the token at `end`, or end it."""
        if not self._length:
            return
        token = self._tokens[end]
        expected, place = self._plan.pop(0) if self._plan else (self._tokens[self._at], self._at + 1)
        if expected == token:
            self._step(place, end)
            return
        self._plan = []
        values = self._values_at(self._at)
        number = None if values is None else values.at(self._at)
        if values is not None and number is not None:
            # Another value: the match continues after it.
            behind = values.end(number)
            if token == self._tokens[behind]:
                self._step(behind + 1, end)
        elif self._tokens[self._at] == token:
            # An edit was not made again.
            if self._edits is not None:
                self._edits.forget(token)
            self._step(self._at + 1, end)
        else:
            self._leave(self._at, end)

    def _step(self, place: int, end: int) -> None:
        """Advance the match by the token at `end`."""
        if place != self._at:
            self._since = end + 1
        self._at = place
        self._length += 1

    def _leave(self, place: int, since: int) -> None:
        """End the match, which may continue at a place; since: the conversation's length when it ended."""
        self._left = [*self._left, (place, since, self._length)][-_LEFT:]
        self._length = 0

    def _search(self) -> bool:
        """Find the longest match of the end among the newest places of its last n-gram; return False for none."""
        tokens = self._tokens
        end = len(tokens)
        size = self.ngram
        place = self._last.get(tuple(tokens[end - size :]), 0) if end > size else 0
        for _ in range(_PLACES):
            if not place:
                break
            length = size
            most = min(place, _LONGEST)
            while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > self._length:
                self._at = place
                self._since = end
                self._length = length
            place = self._before[place]
        return self._length > 0

    def _resume(self) -> bool:
        """Continue a copy that was left; return False for none."""
        copies = [left for left in self._fresh() if left[2] >= _COPY]
        return not self._length and any(self._found(*left) for left in copies)

    def _go_back(self) -> bool:
        """Guess where a text that was left goes on; return False for no guess."""
        fresh = self._fresh()
        if any(self._found(*left) for left in fresh):
            return True
        # As if one token had been replaced.
        copies = [place for place, _, length in fresh if length >= _COPY]
        return bool(copies) and self._guess(copies[0] + 1, _ASSUMED)

    def _fresh(self) -> list[tuple[int, int, int]]:
        """Return the places left that are not forgotten, newest first."""
        return [left for left in reversed(self._left) if len(self._tokens) - left[1] <= _FORGOTTEN]

    def _found(self, place: int, since: int, length: int) -> bool:
        """Continue after the newest token near a place that was left; return False if it is not there."""
        tokens = self._tokens
        end = len(tokens)
        behind = tokens[place : min(place + _BEHIND, end - 1)]
        if tokens[-1] not in behind:
            return False
        at = place + behind.index(tokens[-1])
        if self._edits is not None and length >= _COPY and place < at <= (self._given or 0):
            self._edits.learn(tokens[place:at], tokens[since : end - 1])
        return self._guess(at + 1, _FOUND, min(length, _RESUMED) if length >= _COPY else 1)

    def _guess(self, place: int, number: int, length: int = 1) -> bool:
        self._at = place
        self._since = len(self._tokens)
        self._length = length
        self._class = number
        return place < len(self._tokens)
