"""Scores of pages of a paged cache, whose bounds lie page by page, wherever a table says."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels.launch import cdiv, on, padded, precision, rows

# Pages and channels of a tile: 64 pieces of 128 bytes.
_PAGES, _CHANNELS = 64, 64


@triton.jit(do_not_specialize=["page", "width"])
def paged_kernel(
    bounds,
    question,
    table,
    sizes,
    out,
    page,
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
    request, head = row // heads, row % heads
    there = (tl.load(sizes + request) + page - 1) // page
    place = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    inside = place < there
    at = tl.load(table + request * table_row + place, mask=inside, other=0).to(tl.int64)
    group = tl.arange(0, PADDED_GROUPS)
    sums = tl.full([PAGES, PADDED_GROUPS], 0.0, tl.float32)
    # Nothing is read for tiles of pages that a shorter request does not have.
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


def paged_scores(bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, page: int) -> Tensor:
    """Weighted sums of the bounds of pages that lie anywhere, for every KV head of every request; see page_scores.

    Args:
        bounds: [P, H, 2, D], greatest and least values of every page.
        question: float32 [R, H, G, 2, D].
        table: int32 [R, width], pages of each request in order.
        sizes: int32 [R], entries of each.
        page: entries of a page.

    Returns:
        float32 [R, H, G, width]; -inf behind a request's pages.
    """
    requests, heads, groups = question.shape[:3]
    channels, width = bounds.shape[2] * bounds.shape[3], table.shape[1]
    question, table = question.contiguous(), rows(table)
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
