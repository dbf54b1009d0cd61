"""Columns of a conversation after an edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvsieve.errors import InputError, short

# Tokens after an edit that are prefilled again.
Window = int | Literal["all"]


@dataclass(frozen=True)
class Arrangement:
    """The columns of a conversation after an edit.

    Attributes:
        ids: int64 [N], their tokens.
        source: int64 [N], the column that each token had before, -1 for new tokens.
        before: number of columns before the edit.
    """

    ids: Tensor
    source: Tensor
    before: int

    @classmethod
    def of(cls, ids: Tensor) -> Arrangement:
        """Return the layout of unchanged tokens, int64 [N]."""
        return cls(ids, torch.arange(len(ids)), len(ids))

    def rewritten(self, pieces: list[tuple[int, int] | Tensor]) -> Arrangement:
        """Return the layout of pieces in order: half-open spans of these columns, or new tokens, int64 [M]."""
        ids = [piece if isinstance(piece, Tensor) else self.ids[slice(*piece)] for piece in pieces]
        source = [
            torch.full_like(piece, -1) if isinstance(piece, Tensor) else self.source[slice(*piece)] for piece in pieces
        ]
        return Arrangement(torch.cat([self.ids[:0], *ids]), torch.cat([self.source[:0], *source]), self.before)

    @property
    def target(self) -> Tensor:
        """The column after the edit of each column before it, int64 [before], -1 for removed tokens."""
        out = torch.full((self.before,), -1)
        stays = self.source >= 0
        out[self.source[stays]] = torch.arange(len(self.source))[stays]
        return out

    @property
    def first(self) -> int:
        """First column with another token or another neighbour before it; the number of columns if there is none."""
        changed = (self.source != torch.arange(len(self.source))).nonzero()
        return int(changed[0]) if len(changed) else len(self.source)

    @property
    def is_unchanged(self) -> bool:
        """True if the edit changes nothing."""
        return self.first == len(self.source) == self.before

    def runs(self, window: Window) -> list[tuple[int, int]]:
        """Return the columns to prefill, as half-open spans: new tokens, and `window` after every seam."""
        size = len(self.source)
        if window == "all":
            return [(self.first, size)] if self.first < size else []
        fresh = self.source < 0
        before = torch.cat([torch.tensor([-1]), self.source[:-1]])
        after_new = torch.cat([torch.tensor([False]), fresh[:-1]])
        seams = ~fresh & ((self.source != before + 1) | after_new)
        marked = fresh.clone()
        for seam in seams.nonzero()[:, 0].tolist():
            marked[seam : seam + window] = True
        edges = torch.nn.functional.pad(marked.int(), (1, 1)).diff()
        starts, ends = ((edges == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
        return list(zip(starts, ends, strict=True))


def check_span(span: tuple[int, int], size: int) -> tuple[int, int]:
    """Return a half-open span within `size` columns. Raises InputError for another value."""
    if (
        not isinstance(span, (tuple, list))
        or len(span) != 2
        or any(type(end) is not int for end in span)
        or not 0 <= span[0] < span[1] <= size
    ):
        raise InputError(
            f"a span is (start, end) with 0 <= start < end <= {size}, the tokens of the conversation; got {short(span)}"
        )
    return span[0], span[1]


def check_place(at: int, size: int) -> int:
    """Return a place between tokens, 0 to `size`. Raises InputError for another value."""
    if type(at) is not int or not 0 <= at <= size:
        raise InputError(f"a place is a number of tokens before it, 0 to {size}; got {short(at)}")
    return at


def check_window(window: object) -> Window:
    """Return a window. Raises InputError for another value."""
    if window == "all" or (type(window) is int and window >= 0):
        return window
    raise InputError(f"window is the tokens prefilled again after an edit, from 0, or 'all'; got {short(window)}")
