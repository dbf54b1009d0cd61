"""Entries that evictors keep in any case, and the least budget that follows from them."""

from __future__ import annotations

from typing import ClassVar

_WORDS = {
    "sinks": "{} sinks",
    "prefix": "the prefix of {}",
    "window": "the window of {}",
    "large": "{} large values",
    "recent": "{} recent entries",
    "newest": "{} newest ones",
    "question_tokens": "the question of {}",
}


class Stays:
    """Base of evictors whose `minimum` is one more than the entries that always stay.

    Attributes:
        stays: the fields with their numbers.
    """

    stays: ClassVar[tuple[str, ...]] = ()

    @property
    def minimum(self) -> int:
        return sum(vars(self)[name] for name in self.stays) + 1

    @property
    def why_minimum(self) -> str:
        stay = [_WORDS[name].format(vars(self)[name]) for name in self.stays]
        return f"{', '.join(stay)} and one more" if stay else "one entry"
