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
# Least match of each class above the first two, in tokens; the first one is that of places behind an edit.
_CLASSES = (4, 6, 10, 20, 40)
# Least match that counts as a copy, of which the conversation may leave out, change or add tokens.
_COPY = 8
# Tokens of the original looked through for where a changed copy goes on, and tokens of the copy until it is given up.
_EDIT = 12


class LookupDrafter(Drafter):
    """Finds the longest earlier match of the conversation's end, and proposes what followed it.

    A match that goes on is followed, one step per token; after one that ends, places of the last n-gram are compared.
    Where there is none and a long match has just ended, its continuation behind the changed tokens is proposed.

    Args:
        ngram: least tokens of a match.
    """

    def __init__(self, ngram: int = 3) -> None:
        self.ngram = ngram
        self._tokens: list[int] = []
        # Last place behind each n-gram, and for each place the one before it with the same n-gram.
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []
        self._at = 0
        self._length = 0
        # Place where the conversation left a copy, None without one; and its length then.
        self._left: int | None = None
        self._left_at = 0

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
        if not (self._length or self._realign()):
            return []
        found = self._tokens[self._at : self._at + most]
        # A match that reaches the end repeats itself.
        period = len(self._tokens) - self._at
        while len(found) < most:
            found.append(found[len(found) - period])
        return found

    @property
    def confidence(self) -> int:
        return 0 if self._length < self.ngram else 1 + sum(self._length >= least for least in _CLASSES)

    def _follow(self, end: int) -> None:
        """Go on with the match by the token at `end`, or end it."""
        if self._length and self._tokens[self._at] == self._tokens[end]:
            self._at += 1
            self._length += 1
            return
        if self._length >= _COPY:
            self._left = self._at
            self._left_at = end
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

    def _realign(self) -> bool:
        """Guess where a copy goes on in its original, behind tokens that differ; return False for no guess."""
        tokens = self._tokens
        if self._left is None or len(tokens) - self._left_at > _EDIT:
            return False
        original = tokens[self._left : min(self._left + _EDIT, self._left_at)]
        # Where its last token is found, or else as if one token had been replaced.
        same = original.index(tokens[-1]) if tokens[-1] in original else 0
        self._at = self._left + same + 1
        self._length = 1
        return self._at < len(tokens)
