"""Undo of tokens of a tentative pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvsieve.errors import CacheStateError, InputError, short
from kvsieve.hf.cache.cache import SieveCache


class Transaction(ABC):
    """A tentative pass with last tokens that can be undone until the cache changes otherwise.

    Tokens that are not undone stay. As a context manager it undoes everything that was not accepted within the block.

    Attributes:
        cache: of the pass.
        size: its tokens.
    """

    def __init__(self, cache: SieveCache, size: int, before: int | None = None) -> None:
        """before: the cache's `moment` before the pass, to which it returns if all tokens are undone."""
        self.cache = cache
        self.size = size
        self._before = before
        self._moment = cache.moment
        self._accepted = False

    def accept(self, count: int | Sequence[int]) -> None:
        """Leave the cache as if exactly the first tokens of each row had come, one by one; the others are undone.

        Rows that keep fewer tokens than others have padding in the remaining columns; see `cache.conversation.mask`.

        Args:
            count: number of tokens to keep, for all rows or one for each.

        Raises:
            CacheStateError: the cache has changed since, or this was called before.
            InputError: there are fewer tokens, or rows.
        """
        cache = self.cache
        rows = self.cache.conversation.batch
        counts = (count,) * rows if isinstance(count, int) else tuple(count)
        if len(counts) != rows or not all(0 <= number <= self.size for number in counts):
            raise InputError(
                f"accept takes how many of {self.size} tokens stay, one number or one for each of {rows} rows, got "
                f"{short(count)}"
            )
        cache.check_ready()
        if cache.moment != self._moment:
            raise CacheStateError(
                "tokens of a tentative pass can be taken back only until anything else happens to the cache: accept "
                "right after the pass"
            )
        self._check(counts)
        cache.touch()
        self._accepted = True
        # Until all layers agree.
        cache.status = "broken"
        if min(counts) < self.size:
            self._take_back(counts)
        if any(counts):
            for layer in cache.all_layers:
                layer.drop_unseen(at_once=False)
        elif self._before is not None:
            # As if the pass had never run, so an earlier one can be undone.
            cache.moment = self._before
        cache.status = "ready"

    @abstractmethod
    def _check(self, counts: tuple[int, ...]) -> None:
        """Raise UnsupportedOptionError if tokens cannot be undone in some rows alone."""

    @abstractmethod
    def _take_back(self, counts: tuple[int, ...]) -> None:
        """Undo the rejected tokens."""

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._accepted and self.cache.moment == self._moment:
            self.accept(0)
