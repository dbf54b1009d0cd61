"""Summaries of pages, and the choice of pages that a token attends to.

A page is a block of the engine's KV cache. If a reader has a `page` of its own, a block has parts of so many entries
and scores as its best part. Next to the cache, each page or part has the maximum and minimum of every key channel, per
KV head, or the sum of its keys. A reader's `question` has the weights that turn these into logits. Softmax weights of
pages are summed over the query heads of a KV head, and the blocks with the largest weights are read.

Implementations: torch, the C kernels of `kernels.cpu.pages` on CPUs, and two Triton kernels on GPUs. All choose the
same pages up to ties. Independent of vLLM.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvsieve import kernels
from kvsieve.kernels.cpu import pages as compiled


class PageBounds:
    """Maximum and minimum of the keys of every page and KV head of a layer, or the sums of its keys.

    Args:
        pages: pages of the cache.
        heads: KV heads.
        dim: channels of a key.
        page: entries of a page.
        like: a tensor of the keys' dtype and device.
        parts: of each page, each with its own.
        means: keep sums, for means.

    Attributes:
        page: entries of a part.
        parts: of each page.
        table: [pages * parts, heads, 2, dim] in the keys' dtype; sums: [pages * parts, heads, 1, dim] in float32.
    """

    def __init__(
        self, pages: int, heads: int, dim: int, page: int, like: Tensor, *, parts: int = 1, means: bool = False
    ) -> None:
        self.page = page // parts
        self.parts = parts
        self._means = means
        dtype = torch.float32 if means else like.dtype
        self.table = like.new_zeros(pages * parts, heads, 1 if means else 2, dim, dtype=dtype)

    def update(self, keys: Tensor, slots: Tensor) -> None:
        """Include new keys; the first entry of a part resets it.

        Args:
            keys: [tokens, heads, dim].
            slots: int64 [tokens], page * size + place, of the cache, places of a page in order; negative: not stored.
        """
        if (
            usable(self.table)
            and keys.dtype in compiled.DTYPES
            and keys.stride(2) == 1
            and keys.stride(1) == keys.shape[2]
        ):
            compiled.update_bounds(self.table, keys, slots, self.page)
            return
        # Without a device synchronization: keys that are not stored go to page 0, which engines reserve for padding.
        stored = slots >= 0
        at = torch.where(stored, slots // self.page, 0)
        begun = torch.where(stored & (slots % self.page == 0), at, 0)
        if self._means:
            self.table.index_fill_(0, begun, 0.0).index_add_(0, at, keys[:, :, None].float())
            self.table[0] = 0
            return
        for half, (start, reduce) in enumerate(((float("-inf"), "amax"), (float("inf"), "amin"))):
            bounds = self.table[:, :, half].index_fill_(0, begun, start)
            index = at[:, None, None].expand_as(keys)
            bounds.scatter_reduce_(0, index, keys, reduce)
        self.table[0] = 0

    def replace(self, pages: Tensor, keys: Tensor) -> None:
        """Set the bounds of whole pages.

        Args:
            pages: int64 [n].
            keys: [heads, their entries, dim].
        """
        paged = keys.unflatten(1, (-1, self.page)).transpose(0, 1)
        pages = (pages[:, None] * self.parts + torch.arange(self.parts, device=pages.device)).flatten()
        if self._means:
            self.table[pages] = paged.float().sum(2, keepdim=True)
            return
        self.table[pages] = torch.stack([paged.amax(2), paged.amin(2)], 2).to(self.table.dtype)


def choose_pages(
    bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, counts: Tensor, most: int, page: int, parts: int = 1
) -> Tensor:
    """Choose the pages that each request's KV heads attend to, including the newest.

    Args:
        bounds: the table of PageBounds.
        question: see PagedReader.question.
        table: int32 [requests, width], pages of each request in order.
        sizes: int32 [requests], entries of each.
        counts: int32 [requests], pages to choose of each, or all if there are fewer.
        most: largest of the counts.
        page: entries of a page.
        parts: of each page.

    Returns:
        int32 [requests, heads, most]: page * heads + head, for a cache with one head per page, in the table's order.
        Entries after a request's count or pages are arbitrary valid pages.
    """
    if usable(bounds):
        return compiled.choose_pages(bounds, question, table, sizes, counts, most, page, parts)
    width = table.shape[1]
    heads = bounds.shape[1]
    if kernels.usable(bounds, question) and kernels.choice_fits(width, parts):
        scores = kernels.paged_scores(bounds, question, table, sizes, page // parts, parts)
        return kernels.paged_choice(scores, table, sizes, counts, most, page // parts, parts, bounds.shape[2] == 1)
    weights = _weights(bounds, question, _parted(table, parts), sizes, page // parts)
    weights = weights.unflatten(-1, (width, parts)).amax(-1)
    places = torch.arange(width, device=table.device)
    pages = (sizes.long() + page - 1) // page
    newest = places == (pages - 1)[:, None]
    beyond = places >= pages[:, None]
    weights = weights.masked_fill(newest[:, None], math.inf).masked_fill(beyond[:, None], -1.0)
    best = weights.topk(min(most, width), dim=-1).indices
    wanted = torch.minimum(counts.long(), pages)[:, None, None]
    rank = torch.arange(best.shape[-1], device=table.device)
    best = best.masked_fill(rank >= wanted, width).sort(-1).values.clamp(max=width - 1)
    chosen = table[:, None].expand(-1, heads, -1).gather(2, best) * heads
    chosen = chosen + torch.arange(heads, device=table.device, dtype=torch.int32)[:, None]
    return torch.nn.functional.pad(chosen, (0, most - best.shape[-1])).to(torch.int32)


def _parted(table: Tensor, parts: int) -> Tensor:
    """Return the table of pages' parts."""
    return (table[..., None] * parts + torch.arange(parts, dtype=table.dtype, device=table.device)).flatten(1)


def _weights(bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, page: int) -> Tensor:
    """Return the weight of every page or part, summed over the query heads of a KV head: [requests, heads, width]."""
    places = torch.arange(table.shape[1], device=table.device)
    pages = (sizes.long() + page - 1) // page
    newest = places == (pages - 1)[:, None]
    beyond = places >= pages[:, None]
    if kernels.usable(bounds, question):
        scores = kernels.paged_scores(bounds, question, table, sizes, page)
    else:
        scores = torch.einsum("rhgc,rphc->rhgp", question.flatten(3), bounds[table.long()].float().flatten(3))
    # In the softmax a page counts by its filled part; its weight is that of a full page.
    part = torch.where(newest, (sizes - (pages - 1) * page)[:, None] / page, 1.0)[:, None, None]
    if bounds.shape[2] == 1:
        scores = scores / part
    scores = (scores + part.log()).masked_fill(beyond[:, None, None], float("-inf"))
    return (scores.softmax(-1) / part).sum(2)


def usable(bounds: Tensor) -> bool:
    """Return True if the C kernels support these bounds."""
    return bounds.device.type == "cpu" and bounds.dtype in compiled.DTYPES and compiled.built().reason is None
