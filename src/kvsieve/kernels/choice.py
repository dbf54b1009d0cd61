"""Kernels that choose a token's entries or pages, one program per KV row.

They choose the query's largest channels, the entries of the best pages, or the best pages of a paged cache. In torch
each takes some twenty operations on a few numbers, which take longer to launch than to compute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels.launch import on, padded, power_of_two, rows

# Channels compared with all others at a time.
_COMPARED = 32


def largest_channels(query: Tensor, count: int, scale: float, halves: int) -> tuple[Tensor, Tensor]:
    """Choose the channels in which a group's queries are largest; see `core.page_weights.largest_channels`.

    Returns:
        Weights float32 [X, G, count] and table rows int64 [X, count].
    """
    kv_rows, groups, dim = query.shape
    query = query.contiguous()
    weights = query.new_empty(kv_rows, groups, count, dtype=torch.float32)
    at = query.new_empty(kv_rows, count, dtype=torch.int64)
    with on(query):
        channels_kernel[kv_rows,](
            *(query, weights, at, float(scale), count),
            GROUPS=groups,
            DIM=dim,
            HALVES=halves,
            PADDED_GROUPS=power_of_two(groups),
            PADDED_DIM=padded(dim),
            COMPARED=min(_COMPARED, padded(dim)),
            num_warps=4,
        )
    return weights, at


@triton.jit(do_not_specialize=["count"])
def channels_kernel(
    query,
    weights,
    table_rows,
    scale,
    count,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    HALVES: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    COMPARED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query += row * (GROUPS * DIM)
    group = tl.arange(0, PADDED_GROUPS)
    dim = tl.arange(0, PADDED_DIM)
    q = tl.load(
        query + group[:, None] * DIM + dim[None, :], mask=(group < GROUPS)[:, None] & (dim < DIM)[None, :], other=0.0
    ).to(tl.float32)
    size = tl.sum(tl.abs(q), 0)
    # Rank of each channel: how many are larger, or equal with lower indices.
    rank = tl.full([PADDED_DIM], 0, tl.int32)
    for start in range(0, DIM, COMPARED):
        other = start + tl.arange(0, COMPARED)
        beside = tl.load(
            query + group[:, None] * DIM + other[None, :],
            mask=(group < GROUPS)[:, None] & (other < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        other_size = tl.sum(tl.abs(beside), 0)
        before = (other_size[None, :] > size[:, None]) | (
            (other_size[None, :] == size[:, None]) & (other[None, :] < dim[:, None])
        )
        rank += tl.sum((before & (other < DIM)[None, :]).to(tl.int32), 1)
    chosen = (rank < count) & (dim < DIM)
    # The smallest normal number: a group's channels may be 0 in one of its query heads.
    tiny = 1.1754943508222875e-38
    whole = tl.maximum(tl.sum(tl.abs(q), 1), tiny)
    share = tl.maximum(tl.sum(tl.where(chosen[None, :], tl.abs(q), 0.0), 1) / whole, tiny)
    tl.store(
        weights + (row * GROUPS + group[:, None]) * count + rank[None, :],
        q * (scale / tl.sqrt(share))[:, None],
        mask=(group < GROUPS)[:, None] & chosen[None, :],
    )
    at = dim.to(tl.int64)
    if HALVES == 2:
        at = tl.where(tl.sum(q, 0) > 0, at, at + DIM)
    tl.store(table_rows + row * count + rank, at, mask=chosen)


@triton.jit
def summed_weights(
    scores,
    score_group,
    number,
    there,
    share,
    GROUPS: tl.constexpr,
    SUMS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Return the weights of entries in pages, by softmax over all of them, summed over query heads."""
    weight = tl.full([PAGES], 0.0, tl.float32)
    for group in range(GROUPS):
        score = tl.load(scores + group * score_group + number, mask=there, other=float("-inf"))
        if SUMS:
            # The page's score is that of its keys' sum, as if the page were full.
            score = tl.where(there, score / tl.where(there, share, 1.0), float("-inf"))
        # All entries of a page have its score.
        size_of = tl.exp(score - tl.max(score, 0))
        weight += size_of / tl.sum(size_of * share, 0)
    return weight


@triton.jit
def least_taken(bits, fills, wanted):
    """Return the bits of the greatest weight at which pages with at least this weight have `wanted` entries."""
    # Non-negative numbers are in the order of their bits.
    least = 0
    most_bits = 0x7F800000
    while least < most_bits:
        middle = least + (most_bits - least + 1) // 2
        enough = tl.sum(tl.where(bits >= middle, fills, 0), 0) >= wanted
        least = tl.where(enough, middle, least)
        most_bits = tl.where(enough, most_bits, middle - 1)
    return least


def page_entries(
    scores: Tensor, page: int, count: int, newest: bool, size: int, length: Tensor | None = None
) -> Tensor:
    """Choose the entries of the pages with the highest weights; see `core.page_weights.entries_of_pages`.

    Args:
        scores: float32 [X, G, P], at most `kernels.MOST_PAGES` pages.
        page: entries per page.
        count: entries to choose.
        newest: take the newest entries regardless of their weight.
        size: entries of each KV row.
        length: entries that exist, one integer on the device; None for `size`.

    Returns:
        int64 [X, count], unordered.
    """
    kv_rows, groups, pages = scores.shape
    scores = rows(scores)
    out = torch.empty(kv_rows, count, dtype=torch.int64, device=scores.device)
    width = padded(pages)
    with on(scores):
        entries_kernel[kv_rows,](
            *(scores, length, out, size, page, pages, count, scores.stride(0), scores.stride(1)),
            GROUPS=groups,
            NEWEST=newest,
            LENGTH=length is not None,
            PAGES=width,
            num_warps=min(16, max(1, width // 512)),
        )
    return out


@triton.jit(do_not_specialize=["size", "page", "pages", "count", "score_row", "score_group"])
def entries_kernel(
    scores,
    length,
    out,
    size,
    page,
    pages,
    count,
    score_row,
    score_group,
    GROUPS: tl.constexpr,
    NEWEST: tl.constexpr,
    LENGTH: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if LENGTH:
        end = tl.load(length).to(tl.int32)
    else:
        end = size
    number = tl.arange(0, PAGES)
    fills = tl.minimum(tl.maximum(end - number * page, 0), page)
    fills = tl.where(number < pages, fills, 0)
    there = fills > 0
    share = fills.to(tl.float32) / page
    weight = summed_weights(scores + row * score_row, score_group, number, there, share, GROUPS, False, PAGES)

    out += row * count
    own = 0
    if NEWEST:
        most = tl.maximum(tl.minimum(count // 2, page), 1)
        own = tl.minimum((end - 1) % page + 1, most)
        for start in range(0, own, 32):
            at = start + tl.arange(0, 32)
            tl.store(out + at, (end - 1 - at).to(tl.int64), mask=at < own)
        # Entries taken in any case do not compete.
        fills = tl.where(number == (end - 1) // page, fills - own, fills)
    wanted = count - own
    bits = tl.where(fills > 0, weight.to(tl.int32, bitcast=True), -1)
    least = least_taken(bits, fills, wanted)
    above = tl.where(bits > least, fills, 0)
    equal = tl.where(bits == least, fills, 0)
    rest = wanted - tl.sum(above, 0)
    taken = above + tl.minimum(tl.maximum(rest - (tl.cumsum(equal, 0) - equal), 0), equal)
    place = own + tl.cumsum(taken, 0) - taken
    for step in range(0, tl.max(taken, 0)):
        tl.store(out + place + step, (number * page + step).to(tl.int64), mask=step < taken)
