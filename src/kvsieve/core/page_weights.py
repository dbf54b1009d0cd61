"""Choice of entries by the weights of their pages."""

from __future__ import annotations

import math

from kvsieve import kernels
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap, softmax
from kvsieve.lazy import Tensor, torch
from kvsieve.types import AttentionQueries


def largest(sizes: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest of `sizes` [..., D], ties by the lower one: int64 [..., count]."""
    return sizes.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def held_part(chosen: Tensor, query: Tensor) -> Tensor:
    """Return the share of a query's size, the sum of |q|, in its chosen channels: [..., 1], always positive.

    SparQ's temperature divides by its root, and the chosen channels may all be 0 in one query head of a group.
    """
    tiny = torch.finfo(query.dtype).tiny
    part, whole = (queries.abs().sum(-1, keepdim=True) for queries in (chosen, query))
    return (part / whole.clamp_min(tiny)).clamp_min(tiny)


def largest_channels(query: Tensor, count: int, scale: float, halves: int) -> tuple[Tensor, Tensor]:
    """Choose the channels in which a group's queries are largest, and weigh them to score pages.

    Args:
        query: [X, G, D].
        count: channels to choose.
        scale: factor of the query-key products.
        halves: of the page table. With 2, the sign of the queries' sum selects a channel's largest or smallest value.

    Returns:
        Weights [X, G, count], the queries at SparQ's temperature, and their rows of the table, half * D + channel,
        int64 [X, count].
    """
    if kernels.usable(query):
        return kernels.largest_channels(query, count, scale, halves)
    query = query.to(score_dtype(query.dtype))
    channels = largest(query.abs().sum(1), count)
    chosen = query.gather(2, channels[:, None].expand(-1, query.shape[1], -1))
    weights = chosen * (scale / held_part(chosen, query).sqrt())
    if halves == 2:
        channels = channels + (query.sum(1).gather(1, channels) <= 0) * query.shape[-1]
    return weights, channels


def page_softmax(
    scores: Tensor,
    size: int,
    page: int,
    length: DeviceLength | None = None,
    asked: AttentionQueries | None = None,
) -> Tensor:
    """Return the softmax over entries that all have the score of their page.

    Args:
        scores: [..., pages]; overwritten.
        size: entries in all.
        page: entries per page.
        length: entries that exist, where the device knows; pages beyond the end get 0.
        asked: what the scores are for, sinks of the scores' shape [...]; None where logits have neither cap nor sinks.

    Returns:
        `page` times the weight of one entry of each page, [..., pages].
    """
    scores = scores if asked is None else cap(scores, asked)
    # A page counts once, not once per entry, and so must a sink.
    sinks = None if asked is None or asked.sinks is None else asked.sinks[..., None] - math.log(page)
    if length is not None:
        part = length.occupancy(page, scores.shape[-1]).part.to(scores.dtype)
        return softmax(scores + part.log(), sinks) / part.clamp_min(1 / page)
    short = size % page
    if not short:
        return softmax(scores, sinks)
    scores = scores.clone()
    scores[..., -1] += math.log(short / page)
    weights = softmax(scores, sinks)
    weights[..., -1] *= page / short
    return weights


def entries_of_pages(
    scores: Tensor, kv_rows: KVRows, page: int, count: int, newest: bool, asked: AttentionQueries | None = None
) -> Tensor:
    """Choose the entries of the pages with the highest `page_softmax`, summed over a group's query heads.

    Args:
        scores: [X, G, pages]; overwritten.
        kv_rows: entries of the pages.
        page: entries per page.
        count: entries to choose.
        newest: see `best_entries`.
        asked: as in `page_softmax`.

    Returns:
        int64 [X, count], unordered.
    """
    length = kv_rows.length
    fits = scores.shape[-1] <= kernels.MOST_PAGES
    plain = asked is None or asked.is_plain
    if plain and scores.dtype == torch.float32 and kernels.usable(scores) and fits:
        on_device = None if length is None else length.count
        return kernels.page_entries(scores, page, count, newest, kv_rows.size, on_device)
    weights = page_softmax(scores, kv_rows.size, page, length, asked).sum(1)
    return best_entries(weights, kv_rows.size, page, count, newest, length)


def best_entries(
    weights: Tensor, size: int, page: int, count: int, newest: bool, length: DeviceLength | None = None
) -> Tensor:
    """Choose the entries of the pages with the highest weights.

    The last page needed contributes its first entries; torch decides between pages of equal weight.

    Args:
        weights: [..., pages]; overwritten.
        size: entries in all.
        page: entries per page.
        count: entries to choose.
        newest: take the last page regardless of its weight, but only its newest entries up to half of `count` (at least
            one), so that the weights matter for pages of any length.
        length: entries that exist, at least `count`, where the device knows; None for `size`.

    Returns:
        int64 [..., count].
    """
    pages = weights.shape[-1]
    end = size if length is None else length.count
    if length is not None:
        weights.masked_fill_(length.occupancy(page, pages).hidden, float("-inf"))
    if page == 1:
        if newest and length is not None:
            weights.index_fill_(-1, length.occupancy(page, pages).newest, float("inf"))
        elif newest:
            weights[..., -1] = float("inf")
        return weights.topk(count, dim=-1).indices
    # One more than needed: the newest page may be short, or taken separately.
    best = weights.topk(min(pages, -(-count // page) + 1), dim=-1).indices
    entries = (best[..., None] * page + torch.arange(page, device=best.device)).flatten(-2)
    if newest:
        most = max(min(count // 2, page), 1)
        short = (end - 1) % page + 1
        last = end - 1 - torch.arange(most, device=best.device)
        # Entries taken in any case, the newest page or its end, do not compete.
        end = end - (short.clamp(max=most) if isinstance(short, Tensor) else min(short, most))
        real = torch.cat([(last >= end).expand(*entries.shape[:-1], -1), entries < end], -1)
        entries = torch.cat([last.expand(*entries.shape[:-1], -1), entries], -1)
    else:
        real = entries < end
    order = real.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]
    return entries.gather(-1, order)
