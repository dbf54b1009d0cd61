"""Taking back tokens of a tentative pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvsieve.errors import CacheStateError, InputError, short
from kvsieve.hf.cache.cache import SieveCache


class Transaction(ABC):
    """A tentative pass, whose last tokens can be taken back until anything else happens to its cache.

    What nobody takes back stays. As a context manager it takes back everything that was not accepted within the block.

    Attributes:
        cache: of the pass.
        size: its tokens.
    """

    def __init__(self, cache: SieveCache, size: int) -> None:
        self.cache = cache
        self.size = size
        self._moment = cache.moment
        self._accepted = False

    def accept(self, count: int | Sequence[int]) -> None:
        """Leave the cache as if exactly the first tokens of each row had come, one by one; the others are taken back.

        Rows that keep fewer than others have padding in the columns that these keep: `cache.conversation.mask` says
        which.

        Args:
            count: how many, the same in all rows or one number for each.

        Raises:
            CacheStateError: something else has happened to the cache since, or this was called before.
            InputError: there are not so many tokens, or rows.
        """
        cache = self.cache
        rows = self.cache.conversation.batch
        counts = (count,) * rows if isinstance(count, int) else tuple(count)
        if len(counts) != rows or not all(0 <= each <= self.size for each in counts):
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
        for layer in cache.all_layers:
            layer.drop_unseen(at_once=False)
        cache.status = "ready"

    @abstractmethod
    def _check(self, counts: tuple[int, ...]) -> None:
        """Raise UnsupportedOptionError where tokens cannot be taken back in some rows alone."""

    @abstractmethod
    def _take_back(self, counts: tuple[int, ...]) -> None:
        """Take back what does not stay."""

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._accepted and self.cache.moment == self._moment:
            self.accept(0)
