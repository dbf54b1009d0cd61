"""Scores of pages from channel-major tables of their bounds (core.pages), and updates of the tables by one entry."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels.inputs import StoredRows
from kvsieve.kernels.launch import cdiv, on, padded, power_of_two, precision, rows

# Pages and table rows of a tile: 32 pieces of 256 bytes; eight such programs of three stages fit a multiprocessor.
_PAGES = 128
_ROWS = 32


@triton.jit(do_not_specialize=["number", "page_size", "capacity", "wanted", "index_row"])
def scores_kernel(
    table,
    weights,
    index,
    number_of,
    out,
    number,
    page_size,
    capacity,
    width,
    wanted,
    table_row,
    table_half,
    table_channel,
    index_row,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    CHOSEN: tl.constexpr,
    COUNT: tl.constexpr,
    EXACT: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_row = tl.program_id(1).to(tl.int64)
    if COUNT:
        real = tl.load(number_of).to(tl.int32)
    else:
        real = number
    real = (real + page_size - 1) // page_size
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    group = tl.arange(0, PADDED_GROUPS)
    table += kv_row * table_row
    weights += kv_row * GROUPS * wanted
    sums = tl.full([PADDED_GROUPS, PAGES], 0.0, tl.float32)
    # Tiles of pages beyond the length are not read. Within a tile, reads end with the table's row: they are wide if its
    # width is a multiple of 16.
    last = tl.where(tl.program_id(0) * PAGES < real, wanted, 0)
    for at in range(0, last, ROWS):
        entry = at + tl.arange(0, ROWS)
        inside = entry < wanted
        if CHOSEN:
            place = tl.load(index + kv_row * index_row + entry, mask=inside, other=0)
        else:
            place = entry.to(tl.int64)
        values = tl.load(
            table + (place // DIM * table_half + place % DIM * table_channel)[:, None] + page[None, :],
            mask=inside[:, None] & (page < width)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights + group[:, None] * wanted + entry[None, :],
            mask=(group < GROUPS)[:, None] & inside[None, :],
            other=0.0,
        )
        if EXACT:
            sums += tl.dot(weight, values, input_precision=PRECISION)
        else:
            # A float32 weight is the sum of two numbers of the table's type, all but the last few bits.
            high = weight.to(values.dtype)
            low = (weight - high.to(tl.float32)).to(values.dtype)
            sums += tl.dot(high, values)
            sums += tl.dot(low, values)
    tl.store(
        out + (kv_row * GROUPS + group[:, None]) * capacity + page[None, :],
        tl.where((page < real)[None, :], sums, float("-inf")),
        mask=(group < GROUPS)[:, None] & (page < capacity)[None, :],
    )


@triton.jit(do_not_specialize=["size", "page", "kept", "body_row"])
def update_kernel(
    table,
    keys,
    body,
    tail,
    length,
    size,
    page,
    capacity,
    kept,
    stride,
    body_row,
    key_slot,
    table_row,
    table_half,
    table_channel,
    HALVES: tl.constexpr,
    DIM: tl.constexpr,
    COUNT: tl.constexpr,
    LISTED: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    kv_row = tl.program_id(0).to(tl.int64)
    if COUNT:
        newest = tl.load(length).to(tl.int32) - 1
    else:
        newest = size - 1
    slot = tl.load(tail + kv_row) + (newest - kept) * stride
    if LISTED:
        listed = tl.load(body + kv_row * body_row + newest, mask=newest < kept, other=0)
        slot = tl.where(newest < kept, listed, slot)
    at = newest // page
    begins = newest % page == 0
    dim = tl.arange(0, PADDED_DIM)
    # Triton 3.9's interpreter makes int32 of a mask that is combined with a scalar condition.
    real = dim < tl.where(at < capacity, DIM, 0)
    # Its bfloat16 maxima compare bits.
    key = tl.load(keys + slot * key_slot + dim, mask=real, other=0.0).to(tl.float32)
    places = table + kv_row * table_row + dim.to(tl.int64) * table_channel + at
    bound = tl.load(places, mask=real, other=0.0).to(tl.float32)
    tl.store(places, tl.where(begins, key, tl.maximum(bound, key)), mask=real)
    if HALVES == 2:
        places += table_half
        bound = tl.load(places, mask=real, other=0.0).to(tl.float32)
        tl.store(places, tl.where(begins, key, tl.minimum(bound, key)), mask=real)


def page_scores(
    table: Tensor,
    weights: Tensor,
    rows_of: Tensor | None = None,
    length: Tensor | int | None = None,
    page: int = 1,
) -> Tensor:
    """Return weighted sums of a table's rows, for every page.

    HSA's estimates are those of chosen channels, read in place.

    Args:
        table: [X, halves, D, P], channel-major, or the first P pages of a wider one; reads are wide if the full width
            is a multiple of 16.
        weights: [X, G, J].
        rows_of: int64 [X, J], half * D + channel of each weight's row; None for all rows in order.
        length: entries that exist, an int or one integer on the device; None for all. Pages beyond score -inf.
        page: entries per page.

    Returns:
        float32 [X, G, P].
    """
    kv_rows, _, dim, capacity = table.shape
    groups, wanted = weights.shape[1:]
    table = rows(table)
    weights = weights.to(torch.float32).contiguous()
    out = weights.new_empty(kv_rows, groups, capacity)
    on_device = isinstance(length, Tensor)
    with on(table):
        scores_kernel[cdiv(capacity, _PAGES), kv_rows](
            table,
            weights,
            None if rows_of is None else rows(rows_of),
            length if on_device else None,
            out,
            0 if on_device else capacity * page if length is None else length,
            page,
            capacity,
            _width(table),
            wanted,
            *table.stride()[:3],
            0 if rows_of is None else rows_of.stride(0),
            GROUPS=groups,
            DIM=dim,
            CHOSEN=rows_of is not None,
            COUNT=on_device,
            EXACT=table.dtype == torch.float32,
            PADDED_GROUPS=padded(groups),
            ROWS=min(_ROWS, padded(wanted)),
            PAGES=_PAGES,
            PRECISION=precision(table.dtype),
            num_warps=4,
            num_stages=3,
        )
    return out


def _width(table: Tensor) -> int:
    """Return the width up to which rows of a table can be read, including a wider table that begins with it."""
    end = table.storage_offset() + sum((table.shape[at] - 1) * table.stride(at) for at in range(3))
    width = table.stride(2)
    whole = width > table.shape[3] and (end + width) * table.element_size() <= table.untyped_storage().nbytes()
    return width if whole else table.shape[3]


def page_bounds(table: Tensor, query: Tensor, length: Tensor | int | None = None, page: int = 1) -> Tensor:
    """Compute Quest's bounds ``sum_d max(q_d * max_d, q_d * min_d)`` of every page, float32 [X, G, P].

    query: [X, G, D]; the other arguments as in `page_scores`.
    """
    query = query.to(torch.float32)
    if table.shape[1] == 2:
        query = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
    return page_scores(table, query, None, length, page)


def update_pages(table: Tensor, kv_rows: StoredRows, page: int) -> None:
    """Add the newest entry of each KV row to the table, in place.

    An entry that begins a page sets its bounds; others widen them.

    Args:
        table: [X, halves, D, P].
        kv_rows: X of them, including the newest entry; the length may be on the device.
        page: entries per page.
    """
    count, halves, dim, capacity = table.shape
    body = kv_rows.body
    keys = rows(kv_rows.keys)
    with on(table):
        update_kernel[count,](
            *(table, keys, body, kv_rows.tail, None if kv_rows.length is None else kv_rows.length.count),
            *(kv_rows.size, page, capacity, 0 if body is None else body.shape[1], kv_rows.stride),
            *(0 if body is None else body.stride(0), keys.stride(0), *table.stride()[:3]),
            HALVES=halves,
            DIM=dim,
            COUNT=kv_rows.length is not None,
            LISTED=body is not None,
            PADDED_DIM=power_of_two(dim),
            num_warps=1,
        )
