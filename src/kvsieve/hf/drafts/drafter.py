"""The contract of a drafter, and its use for one row of a batch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsieve.errors import short
from kvsieve.hf.drafts.length import COSTLY, DraftLength

_log = logging.getLogger(__name__)


class Drafter(ABC):
    """A source of tokens that may follow one conversation.

    Attributes:
        free: True if a proposal costs no pass of a model.
        cost: time of drafting a token, in the model's passes over one token.
    """

    free = True
    cost = 0.0

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the conversation; the first call brings all of its tokens so far."""

    @abstractmethod
    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that may follow the conversation; none where it has no guess."""

    @property
    def confidence(self) -> int:
        """Number of the class of the last proposal; acceptance is estimated per class."""
        return 0

    @property
    def note(self) -> str | None:
        """Reason why it proposes nothing any more, or None."""
        return None

    def close(self) -> None:  # noqa: B027
        """Release what it holds beside the conversation's tokens."""


@dataclass
class DraftCounts:
    """Counts of an answer's drafts; of a batch, the sums over its rows.

    Attributes:
        passes: passes after the prompt, until the answer's end.
        drafted_passes: those with drafted tokens.
        drafted: tokens drafted and fed.
        accepted: those that became part of the answer.
    """

    passes: int = 0
    drafted_passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: DraftCounts) -> None:
        """Add another's counts."""
        self.passes += other.passes
        self.drafted_passes += other.drafted_passes
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of the answer that a pass gave on average, 1.0 without drafts."""
        return (self.passes + self.accepted) / max(self.passes, 1)

    def __str__(self) -> str:
        if not self.drafted:
            return f"nothing drafted in {self.passes} passes"
        return (
            f"{self.accepted} of {self.drafted} drafted tokens accepted, {self.drafted_passes} of {self.passes} passes "
            f"drafted, {self.tokens_per_pass:.1f} tokens a pass"
        )


class RowDrafts:
    """Drafts of one row: what to feed behind its last token, and how that went.

    Attributes:
        drafter: proposes.
        length: decides how many tokens are worth a pass.
        counts: so far.
        failure: why a drafter that failed was dropped, or None.
        fits: returns how many tokens of a proposal may follow, by the answer's grammar; None without one.
    """

    def __init__(self, drafter: Drafter, length: DraftLength, tokens: Sequence[int]) -> None:
        """Begin with the conversation's tokens so far, the last one not yet fed included."""
        self.drafter = drafter
        self.length = length
        self.counts = DraftCounts()
        self.failure: str | None = None
        self.fits: Callable[[list[int]], int] | None = None
        self._fed: list[int] = []
        self._unfed: list[int] = []
        self._try(lambda: drafter.extend(tokens))

    @property
    def _class(self) -> int:
        return self.drafter.confidence if self.drafter.free else COSTLY

    @property
    def note(self) -> str | None:
        """Reason why nothing is drafted any more, or None."""
        return self.failure or self.drafter.note

    def next(self, most: int) -> list[int]:
        """Return up to `most` tokens to feed behind the row's last token; none for a plain pass."""
        self._fed = []
        self._unfed = []
        if most < 1 or self.failure is not None:
            return []
        if not self.drafter.free:
            count = min(most, self.length.of_costly())
            self._fed = self._propose(count) if count else []
            return self._fed
        found = self._propose(min(most, self.length.most))
        count = self.length.of_class(self._class, len(found))
        # What it would have said shows whether drafting pays again.
        self._fed = found[:count]
        self._unfed = found[count:] if not count else []
        return self._fed

    def took(self, tokens: Sequence[int]) -> None:
        """Note the tokens that the row got by the pass: accepted drafts, then the model's own token.

        Args:
            tokens: at least one, unless the row has ended.
        """
        accepted = min(max(len(tokens) - 1, 0), len(self._fed))
        self.counts.passes += 1
        self.counts.drafted_passes += bool(self._fed)
        self.counts.drafted += len(self._fed)
        self.counts.accepted += accepted
        if self.drafter.free:
            self.length.spend(len(self._fed), accepted)
        if self._fed:
            self.length.note(self._class, len(self._fed), _right(self._fed, tokens))
        elif self._unfed and tokens:
            self.length.note(self._class, 1, int(self._unfed[0] == tokens[0]))
        self._fed = []
        self._unfed = []
        if self.failure is None:
            self._try(lambda: self.drafter.extend(tokens))

    def close(self) -> None:
        """Release what the drafter holds."""
        self.drafter.close()

    def _propose(self, most: int) -> list[int]:
        found: list[int] = []
        self._try(lambda: found.extend(self.drafter.propose(most)))
        if self.failure is not None:
            return []
        return found[:most] if self.fits is None else found[: self.fits(found[:most])]

    def _try(self, work: Callable[[], None]) -> None:
        """Run a step of the drafter; the answer goes on without drafts where it fails."""
        try:
            work()
        except Exception as error:
            self.failure = (
                f"the draft failed, and the answer went on without: {short(str(error) or type(error).__name__, 200)}"
            )
            _log.warning("%s", self.failure, exc_info=True)


def _right(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of the drafted tokens are the row's own, in order."""
    count = 0
    for guess, token in zip(drafted, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count
