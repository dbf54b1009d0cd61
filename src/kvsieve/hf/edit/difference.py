"""Pieces of a conversation that occur in a changed one: an edit that leads from one to the other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

# Tokens of a run that both conversations have once each, by which pieces are found: a reused piece has no fewer,
# except the common beginning and the common end.
_ANCHOR = 8


def pieces_between(old: Tensor, new: Tensor) -> list[tuple[int, int] | Tensor]:
    """Return the pieces of `old`, half-open spans in ascending order, and the new tokens that together are `new`.

    Args:
        old: int64 [N].
        new: int64 [M].
    """
    before: list[int] = old.tolist()
    after: list[int] = new.tolist()
    start = _common(before, after)
    limit = min(len(before), len(after)) - start
    end = _common(before[::-1][:limit], after[::-1][:limit])
    blocks = [(0, 0, start)]
    blocks += _anchored(before, after, start, len(before) - end, len(after) - end)
    blocks += [(len(before) - end, len(after) - end, end)]
    pieces: list[tuple[int, int] | Tensor] = []
    at = 0
    for source, target, size in blocks:
        if target > at:
            pieces.append(torch.tensor(after[at:target]))
        if size:
            pieces.append((source, source + size))
        at = target + size
    return pieces


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two sequences."""
    size = min(len(first), len(second))
    return next((place for place in range(size) if first[place] != second[place]), size)


def _anchored(
    before: list[int], after: list[int], start: int, before_end: int, after_end: int
) -> list[tuple[int, int, int]]:
    """Return common runs between the beginning and the end, ascending in both: (place, place after, tokens)."""
    olds = _unique(before, start, before_end)
    news = _unique(after, start, after_end)
    pairs = sorted((place, olds[gram]) for gram, place in news.items() if gram in olds)
    found: list[tuple[int, int, int]] = []
    for target, source in _ascending(pairs):
        if found and target < found[-1][1] + found[-1][2]:
            continue
        # A run also begins before its first anchor.
        source_least, target_least = (
            (start, start) if not found else (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2])
        )
        if source < source_least:
            continue
        back = 0
        room = min(source - source_least, target - target_least)
        while back < room and before[source - back - 1] == after[target - back - 1]:
            back += 1
        source, target = source - back, target - back
        size = _common(before[source:before_end], after[target:after_end])
        found.append((source, target, size))
    return found


def _unique(tokens: list[int], start: int, end: int) -> dict[tuple[int, ...], int]:
    """Return the places of runs of `_ANCHOR` tokens that occur once."""
    places: dict[tuple[int, ...], int] = {}
    for place in range(start, end - _ANCHOR + 1):
        gram = tuple(tokens[place : place + _ANCHOR])
        places[gram] = -1 if gram in places else place
    return {gram: place for gram, place in places.items() if place >= 0}


def _ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the most pairs, ascending in both numbers, of pairs ascending in the first."""
    ends: list[int] = []
    last: list[int] = []
    previous: list[int] = []
    for number, (_, source) in enumerate(pairs):
        place = bisect_left(ends, source)
        if place == len(ends):
            ends.append(source)
            last.append(number)
        else:
            ends[place] = source
            last[place] = number
        previous.append(last[place - 1] if place else -1)
    chosen = []
    number = last[-1] if last else -1
    while number >= 0:
        chosen.append(pairs[number])
        number = previous[number]
    return chosen[::-1]
