"""Drafts copied from the conversation: what followed the last place that ended as it ends now.

All tokens are searched as they were given, those included that a plan has evicted or that never reached the deeper
layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsieve.hf.drafts.drafter import Drafter

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


class LookupDrafter(Drafter):
    """Finds the longest earlier match of the conversation's end, and proposes what followed it.

    A match that goes on is followed, one step per token; after one that ends, places of the last n-gram are compared.
    Without one, the conversation may go back to a text that it has just left, for a value that differs or an edit: the
    newest token is looked for behind these places.

    Args:
        ngram: least tokens of a match.
    """

    def __init__(self, ngram: int = 2) -> None:
        self.ngram = ngram
        self._tokens: list[int] = []
        # Last place behind each n-gram, and for each place the one before it with the same n-gram.
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []
        self._at = 0
        self._length = 0
        self._class = _ASSUMED
        # Places that the conversation left, its length then, and whether it had copied a long text; newest last.
        self._left: list[tuple[int, int, bool]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        self._tokens += tokens
        size = self.ngram
        everything = self._tokens
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
        if self._length < self.ngram:
            self._search()
        if not (self._length or self._go_back()):
            return []
        found = self._tokens[self._at : self._at + most]
        # A match that reaches the end repeats itself.
        period = len(self._tokens) - self._at
        while len(found) < most:
            found.append(found[len(found) - period])
        return found

    @property
    def confidence(self) -> int:
        if self._length < self.ngram:
            return self._class
        return 2 + sum(self._length >= least for least in _CLASSES)

    def _follow(self, end: int) -> None:
        """Go on with the match by the token at `end`, or end it."""
        if not self._length:
            return
        if self._tokens[self._at] == self._tokens[end]:
            self._at += 1
            self._length += 1
            return
        self._left = [*self._left, (self._at, end, self._length >= _COPY)][-_LEFT:]
        self._length = 0

    def _search(self) -> None:
        """Find the longest match of the end among the newest places of its last n-gram."""
        tokens = self._tokens
        end = len(tokens)
        size = self.ngram
        if end <= size:
            return
        place = self._last.get(tuple(tokens[end - size :]), 0)
        for _ in range(_PLACES):
            if not place:
                return
            length = size
            most = min(place, _LONGEST)
            while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > self._length:
                self._at = place
                self._length = length
            place = self._before[place]

    def _go_back(self) -> bool:
        """Guess where a text that was left goes on; return False for no guess."""
        tokens = self._tokens
        end = len(tokens)
        left = [place for place in reversed(self._left) if end - place[1] <= _FORGOTTEN]
        for place, _, _ in left:
            behind = tokens[place : min(place + _BEHIND, end - 1)]
            if tokens[-1] in behind:
                return self._guess(place + behind.index(tokens[-1]) + 1, _FOUND)
        # As if one token had been replaced.
        copies = [place for place, _, copied in left if copied]
        return bool(copies) and self._guess(copies[0] + 1, _ASSUMED)

    def _guess(self, place: int, number: int) -> bool:
        self._at = place
        self._length = 1
        self._class = number
        return place < len(self._tokens)
