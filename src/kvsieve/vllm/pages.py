"""Sparse reading over pages: what is known of each page, and which pages a token reads.

A page is a block of the engine's KV cache. Where a reader's `page` is given, a block has parts of so many entries, and
weighs what the best of them does. Beside the cache lie the greatest and the least value of every key channel over each
page or part, per KV head, or the sum of its keys. A reader asks with weights for them: Quest's are the query's own,
which makes bounds of the logits, HSA's are those of the few channels in which the queries are largest. Softmax weights
of pages are summed over the query heads of a KV head, as everywhere in kvsieve, and blocks that weigh most are read
whole.

Plain torch, or on CPUs the C kernels of `kernels.cpu.pages`, and on GPUs two Triton kernels, which ask all pages of all
heads and choose among them; all choose the same pages up to ties; nothing here knows vLLM.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve import kernels
from kvsieve.core.kv_rows import ReadFacts
from kvsieve.core.page_weights import held_part
from kvsieve.errors import PlanError
from kvsieve.kernels.cpu import pages as compiled
from kvsieve.methods.hsa import HSA, stored_entries
from kvsieve.methods.quest import Quest
from kvsieve.methods.readers import LEAST

PageReader = Quest | HSA


@dataclass(frozen=True)
class PageBudget:
    """Pages that one request reads.

    Attributes:
        pages: read exactly, the newest one included.
        channels: key channels that are looked at; 0 for all.
    """

    pages: int
    channels: int = 0


def page_budget(reader: PageReader, length: int, dim: int, page: int) -> PageBudget:
    """Work out what a reader's budget allows on pages of so many entries.

    Quest reads its whole budget in pages, as with ``page=`` given; HSA half of it, and the other half decides in how
    many channels bounds are looked at. Two pages at least are read, the newest and one that the query chooses.

    Args:
        reader: Quest or HSA.
        length: tokens of the request.
        dim: channels of a key.
        page: entries of a page.
    """
    tokens = reader.budget.entries(length, LEAST)
    if isinstance(reader, Quest):
        return PageBudget(max(tokens // page, 2))
    stored = stored_entries(length, 0, tokens) if reader.after_eviction else length
    channels = max(int(dim * page * tokens / max(stored, tokens)), 1)
    return PageBudget(max(tokens // 2 // page, 2), 0 if channels >= dim else channels)


def check_page(reader: PageReader, page: int) -> None:
    """Refuse a reader whose pages do not fit the engine's. Raises PlanError."""
    wanted = reader.page if isinstance(reader, Quest) else None
    if wanted is not None and page % wanted:
        raise PlanError(
            f"Quest: the engine's blocks of {page} entries cannot be divided into pages of {wanted}; give a page= that "
            f"divides them, leave it out, or start vLLM with another block_size"
        )
    tokens = reader.budget.tokens
    part = 1 if isinstance(reader, Quest) else 2
    if tokens is not None and tokens // part < 2 * page:
        raise PlanError(
            f"{type(reader).__name__}: a budget of {tokens} entries reads fewer than two of the engine's blocks of "
            f"{page}; raise budget= to {2 * part * page} or more, or start vLLM with a smaller block_size"
        )


def by_means(reader: PageReader | None) -> bool:
    """Tell whether pages weigh what the means of their keys do, not by bounds."""
    return isinstance(reader, Quest) and reader.means


def parts_of(reader: PageReader | None, page: int) -> int:
    """Return how many parts of their own a page has for a reader."""
    return page // reader.page if isinstance(reader, Quest) and reader.page is not None else 1


def reads_layer(reader: PageReader, layer_idx: int, num_layers: int) -> bool:
    """Tell whether a layer is read sparsely; `skip_layers` name those that are not."""
    return reader.setting(ReadFacts(layer_idx, num_layers, 1 << 20, 0, 64)) is not None


class PageBounds:
    """Greatest and least key values of every page and KV head of a layer, or the sums of its keys.

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
        self.page, self.parts, self._means = page // parts, parts, means
        dtype = torch.float32 if means else like.dtype
        self.table = like.new_zeros(pages * parts, heads, 1 if means else 2, dim, dtype=dtype)

    def update(self, keys: Tensor, slots: Tensor) -> None:
        """Take in new keys; the first place of a part begins it anew.

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
        # Without waiting for the device: page 0, which engines keep for padding, takes what goes nowhere.
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
        """Put the bounds of whole pages in place.

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


def question_of_means(query: Tensor, scale: float, page: int) -> Tensor:
    """Make the weights, float32 [requests, heads, groups, 1, dim], that ask sums of pages as `question_of` asks bounds.

    Args:
        query: [requests, heads, groups, dim].
        scale: factor of query-key products.
        page: entries that a full sum has.
    """
    return (query.float() * (scale / page))[:, :, :, None].contiguous()


def question_of(query: Tensor, scale: float, channels: Tensor | None) -> Tensor:
    """Make the weights with which a page's bounds are asked.

    Args:
        query: [requests, heads, groups, dim].
        scale: factor of query-key products.
        channels: int64 [requests], channels that are looked at, 0 for all; None: all in every request.

    Returns:
        float32 [requests, heads, groups, 2, dim], contiguous.
    """
    query = query.float()
    question = torch.stack([query.clamp(min=0), query.clamp(max=0)], 3)
    if channels is None:
        return question.mul_(scale)
    order = query.abs().sum(2).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        2, order, torch.arange(query.shape[3], device=query.device).expand_as(order)
    )
    looked = (rank < channels[:, None, None])[:, :, None]
    chosen = query * looked
    chosen = chosen * (scale / held_part(chosen, query).sqrt())
    greatest = (query.sum(2) > 0)[:, :, None]
    few = torch.stack([chosen * greatest, chosen * ~greatest], 3)
    return torch.where((channels > 0)[:, None, None, None, None], few, question.mul_(scale))


def choose_pages(
    bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, counts: Tensor, most: int, page: int, parts: int = 1
) -> Tensor:
    """Choose the pages that each request's KV heads read, the newest one always among them.

    Args:
        bounds: the table of PageBounds.
        question: see `question_of`, and for sums `question_of_means`.
        table: int32 [requests, width], pages of each request in order.
        sizes: int32 [requests], entries of each.
        counts: int32 [requests], pages to choose of each; one that has no more gets them all.
        most: largest of the counts.
        page: entries of a page.
        parts: of each page.

    Returns:
        int32 [requests, heads, most]: page * heads + head, as in a cache whose pages are taken apart by heads, in the
        table's order. What lies behind a request's count or pages has no meaning and names some page.
    """
    if usable(bounds):
        return compiled.choose_pages(bounds, question, table, sizes, counts, most, page, parts)
    width, heads = table.shape[1], bounds.shape[1]
    if kernels.usable(bounds, question) and kernels.choice_fits(width, parts):
        scores = kernels.paged_scores(bounds, question, table, sizes, page // parts, parts)
        return kernels.paged_choice(scores, table, sizes, counts, most, page // parts, parts, bounds.shape[2] == 1)
    weights = _weights(bounds, question, _parted(table, parts), sizes, page // parts)
    weights = weights.unflatten(-1, (width, parts)).amax(-1)
    places = torch.arange(width, device=table.device)
    pages = (sizes.long() + page - 1) // page
    newest, beyond = places == (pages - 1)[:, None], places >= pages[:, None]
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
    """Weigh every page, or part of one, for all query heads of a KV head together: [requests, heads, width]."""
    places = torch.arange(table.shape[1], device=table.device)
    pages = (sizes.long() + page - 1) // page
    newest, beyond = places == (pages - 1)[:, None], places >= pages[:, None]
    scores = page_logits(bounds, question, table, sizes, page)
    # A page counts by its part that is filled, in the softmax; its weight is that of one that is full.
    part = torch.where(newest, (sizes - (pages - 1) * page)[:, None] / page, 1.0)[:, None, None]
    if bounds.shape[2] == 1:
        scores = scores / part
    scores = (scores + part.log()).masked_fill(beyond[:, None, None], float("-inf"))
    return (scores.softmax(-1) / part).sum(2)


def page_logits(bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, page: int) -> Tensor:
    """Ask every page of every request, float32 [requests, heads, groups, width]; arguments as in `choose_pages`."""
    if kernels.usable(bounds, question):
        return kernels.paged_scores(bounds, question, table, sizes, page)
    held = bounds[table.long()].float().flatten(3)
    return torch.einsum("rhgc,rphc->rhgp", question.flatten(3), held)


def usable(bounds: Tensor) -> bool:
    """Tell whether the C kernels work on these bounds."""
    return bounds.device.type == "cpu" and bounds.dtype in compiled.DTYPES and _built()


@functools.cache
def _built() -> bool:
    return compiled.built().reason is None


def kernel_status() -> str:
    """Tell for people whether the C kernels are used."""
    return compiled.built().status
