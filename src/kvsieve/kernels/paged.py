"""Scores and choice of the pages of a paged cache, with bounds stored page by page and located by a table.

A page of the cache may be several pages here, its parts, in order; it weighs as much as its best part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels import MOST_PAGES
from kvsieve.kernels.choice import least_taken, summed_weights
from kvsieve.kernels.launch import cdiv, on, padded, power_of_two, precision, rows

# Pages and channels of a tile: 64 pieces of 128 bytes.
_PAGES = 64
_CHANNELS = 64


@triton.jit(do_not_specialize=["page", "parts", "width"])
def paged_kernel(
    bounds,
    question,
    table,
    sizes,
    out,
    page,
    parts,
    width,
    heads,
    bounds_page,
    bounds_head,
    table_row,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EXACT: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PIECE: tl.constexpr,
    PAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    request = row // heads
    head = row % heads
    there = (tl.load(sizes + request) + page - 1) // page
    place = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    inside = place < there
    at = tl.load(table + request * table_row + place // parts, mask=inside, other=0).to(tl.int64)
    at = at * parts + place % parts
    group = tl.arange(0, PADDED_GROUPS)
    sums = tl.full([PAGES, PADDED_GROUPS], 0.0, tl.float32)
    # Tiles of pages beyond a shorter request are not read.
    last = tl.where(tl.program_id(0) * PAGES < there, CHANNELS, 0)
    for begin in range(0, last, PIECE):
        channel = begin + tl.arange(0, PIECE)
        values = tl.load(
            bounds + (at * bounds_page + head * bounds_head)[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < CHANNELS)[None, :],
            other=0.0,
        )
        weight = tl.load(
            question + (row * GROUPS + group)[None, :] * CHANNELS + channel[:, None],
            mask=(group < GROUPS)[None, :] & (channel < CHANNELS)[:, None],
            other=0.0,
        )
        if EXACT:
            sums += tl.dot(values, weight, input_precision=PRECISION)
        else:
            high = weight.to(values.dtype)
            low = (weight - high.to(tl.float32)).to(values.dtype)
            sums += tl.dot(values, high)
            sums += tl.dot(values, low)
    tl.store(
        out + (row * GROUPS + group)[None, :] * width + place[:, None],
        tl.where(inside[:, None], sums, float("-inf")),
        mask=(group < GROUPS)[None, :] & (place < width)[:, None],
    )


def paged_scores(bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, page: int, parts: int = 1) -> Tensor:
    """Return weighted sums of the bounds of pages for every KV head of every request; see page_scores.

    Args:
        bounds: [P * parts, H, 2, D], greatest and least values of every part, or float32 [P * parts, H, 1, D], sums.
        question: float32 [R, H, G, 2 or 1, D].
        table: int32 [R, width], pages of the cache of each request in order.
        sizes: int32 [R], entries of each.
        page: entries per part.
        parts: per page of the cache.

    Returns:
        float32 [R, H, G, width * parts]; -inf beyond a request's entries.
    """
    requests, heads, groups = question.shape[:3]
    channels = bounds.shape[2] * bounds.shape[3]
    width = table.shape[1] * parts
    question = question.contiguous()
    table = rows(table)
    if bounds.stride(3) != 1 or bounds.stride(2) != bounds.shape[3]:
        raise ValueError(f"bounds of a page must lie side by side, got strides {bounds.stride()}")
    out = question.new_empty(requests, heads, groups, width)
    with on(bounds):
        paged_kernel[cdiv(width, _PAGES), requests * heads](
            bounds,
            question,
            table,
            sizes,
            out,
            page,
            parts,
            width,
            heads,
            bounds.stride(0),
            bounds.stride(1),
            table.stride(0),
            GROUPS=groups,
            CHANNELS=channels,
            EXACT=bounds.dtype == torch.float32,
            PADDED_GROUPS=padded(groups),
            PIECE=min(_CHANNELS, padded(channels)),
            PAGES=_PAGES,
            PRECISION=precision(bounds.dtype),
            num_warps=4,
            num_stages=3,
        )
    return out


@triton.jit(do_not_specialize=["page", "width", "most", "score_row", "score_group", "table_row"])
def paged_choice_kernel(
    scores,
    table,
    sizes,
    counts,
    out,
    page,
    width,
    most,
    heads,
    score_row,
    score_group,
    table_row,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // heads
    head = row % heads
    end = tl.load(sizes + request)
    pages = (end + page * PARTS - 1) // (page * PARTS)
    wanted = tl.minimum(tl.load(counts + request), pages)
    number = tl.arange(0, BLOCKS * PADDED_PARTS)
    block = number // PADDED_PARTS
    part = number % PADDED_PARTS
    place = block * PARTS + part
    fills = tl.minimum(tl.maximum(end - place * page, 0), page)
    fills = tl.where((part < PARTS) & (block < width), fills, 0)
    share = fills.to(tl.float32) / page
    weight = summed_weights(
        scores + row * score_row, score_group, place, fills > 0, share, GROUPS, SUMS, BLOCKS * PADDED_PARTS
    )
    # All parts of a competing page are full; the newest page is read in any case.
    bits = tl.where((block < pages - 1) & (fills > 0), weight.to(tl.int32, bitcast=True), -1)
    if PADDED_PARTS > 1:
        bits = tl.max(tl.reshape(bits, [BLOCKS, PADDED_PARTS]), 1)
    block = tl.arange(0, BLOCKS)
    there = (bits >= 0).to(tl.int32)
    least = least_taken(bits, there, wanted - 1)
    above = (bits > least).to(tl.int32)
    equal = (bits == least).to(tl.int32)
    rest = wanted - 1 - tl.sum(above, 0)
    taken = above + tl.where(tl.cumsum(equal, 0) <= rest, equal, 0)
    taken = tl.where((block == pages - 1) & (wanted > 0), 1, taken)
    at = tl.load(table + request * table_row + block, mask=taken > 0, other=0)
    out += row * most
    tl.store(out + tl.cumsum(taken, 0) - 1, (at * heads + head).to(tl.int32), mask=taken > 0)
    # Entries beyond them name an existing page.
    for start in range(wanted, most, 32):
        behind = start + tl.arange(0, 32)
        tl.store(out + behind, tl.zeros([32], tl.int32) + head.to(tl.int32), mask=behind < most)


def paged_choice(
    scores: Tensor, table: Tensor, sizes: Tensor, counts: Tensor, most: int, page: int, parts: int, sums: bool
) -> Tensor:
    """Choose the pages that each request's KV heads read; see `kvsieve_vllm.pages`.

    Args:
        scores: float32 [R, H, G, width * parts], at most `kernels.MOST_PAGES` of them; see `paged_scores`.
        table: int32 [R, width].
        sizes: int32 [R].
        counts: int32 [R].
        most: largest of the counts.
        page: entries per part.
        parts: per page of the cache.
        sums: the scores are those of sums of keys.

    Returns:
        int32 [R, H, most].
    """
    requests, heads, groups = scores.shape[:3]
    table, width = rows(table), table.shape[1]
    out = torch.empty(requests, heads, most, dtype=torch.int32, device=scores.device)
    blocks = padded(width)
    wide = power_of_two(parts)
    with on(scores):
        paged_choice_kernel[requests * heads,](
            *(scores, table, sizes, counts, out, page, width, most, heads),
            *(scores.stride(1), scores.stride(2), table.stride(0)),
            GROUPS=groups,
            PARTS=parts,
            SUMS=sums,
            BLOCKS=blocks,
            PADDED_PARTS=wide,
            num_warps=min(16, max(1, blocks * wide // 512)),
        )
    return out


def choice_fits(width: int, parts: int) -> bool:
    """Return whether the single program of `paged_choice` can process this many pages of a request."""
    return padded(width) * power_of_two(parts) <= MOST_PAGES
