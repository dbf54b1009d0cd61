"""Numbers of tokens to draft, by estimated acceptance and by the cost of passes over more tokens.

Times are not looked at, so that the same prompt gives the same passes.
"""

from __future__ import annotations

import math

# Share of a class's estimate that a new token replaces.
_RATE = 0.1
# Passes without a draft after costly drafts that did not pay; twice as many each time.
_PAUSE = 4
_LONGEST_PAUSE = 64
# Gain in tokens per time below which nothing is drafted.
_MARGIN = 1.05
# Most time that free drafts may lose, in passes over one token: at first, and for each pass of the answer. Drafts that
# were accepted add what they gained.
_CREDIT = 0.6
_SHARE = 0.015
# Class from which on a draft may always take the first of these: a long match has begun.
_SURE = 5
# Most time of a pass that several requests wait for, over that of one without drafts.
_SHARED = 5 / 3
# Estimates to begin with, by class; later classes are surer.
_PRIORS = (0.4, 0.5, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95)
# Class of drafts that cost passes.
COSTLY = 5


class DraftLength:
    """Decides the number of drafted tokens of a row's next pass.

    Args:
        most: drafted tokens of a pass.
        slope: time of each token of a pass after the first, in passes over one token.
        draft: time of drafting a token, in the same unit; 0 for a free drafter.
        first: further time of a pass over several tokens, of any number, for each answer in it.
        adapt: False to draft `most` tokens always.

    Attributes:
        rows: answers that share the passes: with more of them a pass yields more tokens in the time of a draft.
    """

    def __init__(self, most: int, slope: float, draft: float = 0.0, first: float = 0.0, *, adapt: bool = True) -> None:
        self.most = most
        self.slope = slope
        self.draft = draft
        self.first = first
        self.adapt = adapt
        self.rows = 1
        self._accepts = list(_PRIORS)
        self._wait = 0
        self._pause = _PAUSE
        # Gain of the free drafts so far, in passes over one token; and the answer's passes.
        self._gain = 0.0
        self._passes = 0

    def of_class(self, number: int, offered: int) -> int:
        """Return how many of `offered` tokens of a proposal to feed; number: its class."""
        offered = min(offered, self.most)
        if not self.adapt:
            return offered
        allowed = self._gain + _CREDIT + _SHARE * self._passes
        if number >= _SURE:
            allowed = max(allowed, _CREDIT)
        return self._best(self._accepts[min(number, len(_PRIORS) - 1)], offered, allowed)

    def most_shared(self, answers: int) -> int:
        """Return the most drafted tokens, of all answers together, for a pass that several requests wait for."""
        plain = 1 + self.slope * (answers - 1)
        spare = (_SHARED - 1) * plain - self.first * answers
        return max(int(spare / (self.slope + self.draft)), 0)

    def of_costly(self) -> int:
        """Return how many tokens to draft by passes of a model; 0 while drafting pauses."""
        if not self.adapt:
            return self.most
        if self._wait:
            self._wait -= 1
            return 0
        count = self._best(self._accepts[COSTLY], self.most)
        # Even drafts that are all right may not pay.
        if count or not self._best(1.0, self.most):
            return count
        # A trial, then a pause.
        self._wait = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return int(self.slope < 1)

    def spend(self, drafted: int, accepted: int) -> None:
        """Count a pass of the answer and its free drafts. drafted: tokens fed; accepted: how many the row took."""
        self._passes += 1
        if drafted:
            self._gain += accepted - (self.first + self.slope * drafted) * self._part

    def note(self, number: int, drafted: int, accepted: int) -> None:
        """Update the estimate of a class.

        Args:
            number: of the class.
            drafted: tokens fed.
            accepted: how many of them the row took.
        """
        number = min(number, len(_PRIORS) - 1)
        accept = self._accepts[number]
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            accept += _RATE * (right - accept)
        self._accepts[number] = accept
        if accepted == drafted:
            self._pause = _PAUSE

    def _best(self, accept: float, offered: int, allowed: float = math.inf) -> int:
        """Return the number of drafted tokens with the most tokens per time; 0 if none pays.

        Args:
            accept: estimate for each token.
            offered: most tokens.
            allowed: most time that their pass may take longer, in passes over one token.
        """
        best = 0
        gain = _MARGIN
        share = self._part
        cost = (self.slope + self.draft) * share
        tokens = 1.0
        chance = 1.0
        for count in range(1, offered + 1):
            if (self.first + count * self.slope) * share > allowed:
                break
            chance *= accept
            tokens += chance
            rate = tokens / (1 + self.first * share + count * cost)
            if rate > gain:
                best = count
                gain = rate
        return best

    @property
    def _part(self) -> float:
        """Time in passes of an answer's own: its share of one that several rows make longer."""
        return self.rows / (1 + self.slope * (self.rows - 1))
