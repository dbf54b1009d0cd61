"""Pages of consecutive entries: their channel-wise bounds, kept up to date, and tokens chosen by pages' weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvsieve.core.lines import Lines


class PageTable:
    """Least and greatest value of every key channel over each page of `page` consecutive entries (Quest, HSA).

    Channel-major, [X, halves, D, capacity], so that a few channels of all pages are contiguous reads; half 0 holds the
    greatest values, half 1 the least ones. Pages of one entry need one half only.
    """

    def __init__(self, page: int) -> None:
        self.page = page
        self.size = 0
        self._table: Tensor | None = None
        self._starts: Tensor | None = None

    @property
    def pages(self) -> int:
        return -(-self.size // self.page)

    @property
    def halves(self) -> int:
        return 1 if self.page == 1 else 2

    def follow(self, lines: Lines) -> None:
        """Take in the entries that have been stored since; those of full pages never change again."""
        if self.size < lines.size:
            self._add(lines.keys_at(lines.span(self.size, lines.size)))

    def bounds(self) -> Tensor:
        """[X, halves, D, pages], a view."""
        assert self._table is not None
        return self._table[..., : self.pages]

    def rows(self, channels: Tensor, greatest: Tensor) -> Tensor:
        """Chosen channels, int64 [X, k], of all pages [X, k, pages]: greatest values where `greatest`, else least."""
        assert self._table is not None
        lines, _, dim, capacity = self._table.shape
        if self._starts is None or len(self._starts) != lines:
            self._starts = torch.arange(lines, device=channels.device)[:, None] * (self.halves * dim)
        at = channels + self._starts
        if self.halves == 2:
            at = at + (~greatest) * dim
        return self._table.view(-1, capacity).index_select(0, at.view(-1)).view(*at.shape, capacity)[..., : self.pages]

    def nbytes(self) -> int:
        return 0 if self._table is None else self._table.nbytes

    def _add(self, keys: Tensor) -> None:
        lines, new, dim = keys.shape
        # Entries that complete the newest page, then whole pages, of which the last may be short.
        first = min(new, -self.size % self.page)
        needed = -(-(self.size + new) // self.page)
        if self._table is None or needed > self._table.shape[-1]:
            table = keys.new_zeros(lines, self.halves, dim, needed + max(32, needed // 8))
            if self._table is not None:
                table[..., : self._table.shape[-1]] = self._table
            self._table = table
        if new == 1 and not first:
            # The one entry of a page that begins with it is both its bounds.
            self._table[..., needed - 1] = keys
            self.size += 1
            return
        if first:
            newest, part = self._table[..., self.pages - 1], keys[:, :first]
            torch.maximum(newest[:, 0], part.amax(1), out=newest[:, 0])
            if self.halves == 2:
                torch.minimum(newest[:, 1], part.amin(1), out=newest[:, 1])
        start = self.pages
        self.size += new
        if new == first:
            return
        rest = keys[:, first:]
        short = -rest.shape[1] % self.page
        if short:
            rest = torch.cat([rest, rest[:, -1:].expand(-1, short, -1)], 1)
        paged = rest.unflatten(1, (-1, self.page))
        self._table[:, 0, :, start:needed] = paged.amax(2).transpose(1, 2)
        if self.halves == 2:
            self._table[:, 1, :, start:needed] = paged.amin(2).transpose(1, 2)


def largest(sizes: Tensor, count: int) -> Tensor:
    """int64 [..., count]: the channels of greatest size [..., D], the lower one of equals first."""
    return sizes.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def held_part(chosen: Tensor, query: Tensor) -> Tensor:
    """[..., 1]: the part of a query's size, sum of |q|, that is in its chosen channels; never quite 0.

    SparQ's temperature divides by its root, and a group's channels may be 0 in one of its query heads.
    """
    tiny = torch.finfo(query.dtype).tiny
    part, whole = (each.abs().sum(-1, keepdim=True) for each in (chosen, query))
    return (part / whole.clamp_min(tiny)).clamp_min(tiny)


def shares(scores: Tensor, size: int, page: int) -> Tensor:
    """Softmax over `size` entries that have their page's score: `page` times the weight of one, [..., pages]."""
    short = size % page
    if not short:
        return scores.softmax(-1)
    scores = scores.clone()
    scores[..., -1] += math.log(short / page)
    weights = scores.softmax(-1)
    weights[..., -1] *= page / short
    return weights


def best_entries(weights: Tensor, size: int, page: int, count: int, newest: bool) -> Tensor:
    """The `count` entries of the pages with the highest weights [..., pages]: int64 [..., count].

    Of the last page that is needed, its first entries; which of pages that weigh the same is left to torch. newest: the
    last page is taken whatever it weighs; `weights` is written to.
    """
    if newest:
        weights[..., -1] = float("inf")
    if page == 1:
        return weights.topk(count, dim=-1).indices
    pages = weights.shape[-1]
    # One more than needed, because the newest page may be short.
    best = weights.topk(min(pages, -(-count // page) + 1), dim=-1).indices
    entries = (best[..., None] * page + torch.arange(page, device=best.device)).flatten(-2)
    if size % page == 0:
        return entries[..., :count]
    real = entries < size
    order = real.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]
    return entries.gather(-1, order)
