"""Fitting of prompts to a length."""

from __future__ import annotations

from collections.abc import Callable

from kvsieve.errors import InputError
from kvsieve.lab.tasks.haystack import noise_words
from kvsieve.lab.tasks.samples import Sample

Count = Callable[[Sample], int]


def fit(make: Callable[[int], Sample], count: Count, length: int, name: str) -> tuple[Sample, int]:
    """Return the longest ``make(n)`` of at most `length` tokens, and its n. ``make`` must grow with n.

    Raises InputError if even ``make(0)`` is longer.
    """
    low = 0
    low_tokens = count(make(0))
    if low_tokens > length:
        raise InputError(f"{name} needs prompts of at least {low_tokens} tokens, got a length of {length}; raise it")
    step = 16
    high = 0
    high_tokens = low_tokens
    while high_tokens <= length:
        low = high
        low_tokens = high_tokens
        high = low + step
        high_tokens = count(make(high))
        per_unit = max((high_tokens - low_tokens) / step, 0.1)
        step = max(int((length - high_tokens) / per_unit * 1.02) + 1, step)
    while high - low > 1:
        # Between the two by the rule of three, but never at an end, so that the search always advances.
        share = (length - low_tokens) / max(high_tokens - low_tokens, 1)
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        tokens = count(make(middle))
        if tokens <= length:
            low = middle
            low_tokens = tokens
        else:
            high = middle
            high_tokens = tokens
    return make(low), low


def fit_padded(make: Callable[[int, str], Sample], count: Count, length: int, name: str) -> Sample:
    """Fit units too coarse to hit a length, as `fit` does, and fill the rest with noise.

    make: (units, filler text) -> sample.
    """
    _, units = fit(lambda n: make(n, ""), count, length, name)
    return fit(lambda n: make(units, noise_words(n)), count, length, name)[0]
