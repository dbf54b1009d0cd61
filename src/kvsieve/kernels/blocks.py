"""Attention of a prompt over chosen key blocks, read in place: nothing is gathered or padded.

A program takes a tile of one query head's queries. It iterates over the list of its blocks, then over the diagonal up
to its last query, with an online softmax: logits never leave the chip.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels.inputs import PromptGrid, Queries
from kvsieve.kernels.launch import cdiv, fitting, on, padded, precision, rows
from kvsieve.kernels.split import beside, capped

# Bytes of a tile of queries and of one of keys or values: 128 queries and 64 entries of 128 bfloat16 channels. With two
# stages of keys and values in flight that is less than the 99 KiB that the smallest of the GPUs give a program, and an
# H100 runs two programs of four warps at a time: one computes weights while the other multiplies. There eight warps,
# more stages and wider tiles were all slower (by 1.05 to 2.2).
_QUERY_BYTES = 32 << 10
_KEY_BYTES = 16 << 10


@triton.jit
def _met(
    q,
    k,
    v,
    seen,
    greatest,
    total,
    sums,
    scale,
    softcap,
    HIDES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Update the online softmax with these entries; seen: which of them are visible to which query, if HIDES."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    # In units of log 2. Without a cap or sinks the exponential applies the factor: one operation less.
    unit = scale * 1.4426950408889634
    if SOFTCAP:
        logits = capped(logits * unit, softcap * 1.4426950408889634)
        unit = 1.0
    if HIDES:
        logits = tl.where(seen, logits, float("-inf"))
    higher = tl.maximum(greatest, tl.max(logits, 1) * unit)
    # Queries that have seen nothing so far have no greatest logit.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits * unit - finite[:, None])
    shrink = tl.exp2(greatest - finite)
    sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weights, 1), sums


@triton.jit(do_not_specialize=["new", "length", "pad", "query_blocks", "list_row"])
def blocks_kernel(
    query,
    keys,
    values,
    out,
    lists,
    counts,
    sinks,
    scale,
    softcap,
    new,
    length,
    pad,
    query_blocks,
    list_row,
    query_row,
    query_head,
    query_slot,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    heads,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HIDES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    query_heads = heads * GROUPS
    own_head = (tl.program_id(0) % query_heads).to(tl.int64)
    head = own_head // GROUPS
    # The last queries see most entries and start first.
    tile = query_blocks * TILES - 1 - tl.program_id(0) // query_heads
    at_block = tile // TILES
    inside = tile % TILES * ROWS + tl.arange(0, ROWS)
    number = at_block * QUERIES + inside
    real = (inside < QUERIES) & (number < new)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    value_dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    q = tl.load(
        query + row * query_row + own_head * query_head + number[:, None].to(tl.int64) * query_slot + dim,
        mask=real[:, None] & (dim < DIM),
        other=0.0,
    )
    keys += row * key_row + head * key_head + dim
    values += row * value_row + head * value_head + value_dim
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    sums = tl.full([ROWS, PADDED_VALUE_DIM], 0.0, tl.float32)

    item = (row * (query_heads // SHARED) + own_head // SHARED) * query_blocks + at_block
    lists += item * list_row
    for step in range(0, tl.load(counts + item) * STEPS):
        at = step % STEPS * BLOCK + tl.arange(0, BLOCK)
        entry = tl.load(lists + step // STEPS) * KEYS - pad + at
        # The first block begins before the first entry, and a block need not be a multiple of the tile.
        there = (at < KEYS) & (entry >= 0)
        slot = entry[:, None].to(tl.int64)
        k = tl.load(keys + slot * key_slot, mask=there[:, None] & (dim < DIM), other=0.0)
        v = tl.load(values + slot * value_slot, mask=there[:, None] & (value_dim < VALUE_DIM), other=0.0)
        greatest, total, sums = _met(
            q, k, v, there[None, :], greatest, total, sums, scale, softcap, HIDES, SOFTCAP, PRECISION
        )

    first = length - new + at_block * QUERIES
    last = tl.minimum(first + (tile % TILES + 1) * ROWS, length)
    for start in range(first, last, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        there = (entry < length)[:, None]
        seen = entry[None, :] <= (length - new + number)[:, None]
        slot = entry[:, None].to(tl.int64)
        k = tl.load(keys + slot * key_slot, mask=there & (dim < DIM), other=0.0)
        v = tl.load(values + slot * value_slot, mask=there & (value_dim < VALUE_DIM), other=0.0)
        greatest, total, sums = _met(q, k, v, seen, greatest, total, sums, scale, softcap, True, SOFTCAP, PRECISION)

    sums /= tl.where(total > 0, total, 1.0)[:, None]
    if SINKS:
        sink = tl.load(sinks + own_head).to(tl.float32)
        sums *= beside(sink, greatest * 0.6931471805599453, total)[:, None]
    place = (row * new + number) * query_heads + own_head
    tl.store(
        out + place[:, None] * VALUE_DIM + value_dim,
        sums,
        mask=real[:, None] & (value_dim < VALUE_DIM),
    )


def block_attention(
    asked: Queries, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, grid: PromptGrid
) -> Tensor:
    """Attend causally from the last L of N entries to chosen blocks and the diagonal, without waiting for the device.

    Queries, keys and values may be views of larger buffers.

    Args:
        asked: queries [B, Hq, L, D].
        keys: [B, H, N, D], without padding.
        values: [B, H, N, Dv].
        lists: int32 [B, S, query blocks, some], contiguous, numbers of blocks before the diagonal; S is H or Hq.
        counts: int32 [B, S, query blocks], contiguous, the length of each list.
        grid: the blocks.

    Returns:
        [B, Hq, L, Dv], with a token's heads adjacent in memory.
    """
    batch, query_heads, new, dim = asked.query.shape
    heads = keys.shape[1]
    value_dim = values.shape[-1]
    query = rows(asked.query)
    keys = rows(keys)
    values = rows(values)
    out = query.new_empty(batch, new, query_heads, value_dim)
    width = max(padded(dim), padded(value_dim)) * query.element_size()
    tile = min(fitting(_QUERY_BYTES, width, 128), padded(grid.queries))
    block = min(fitting(_KEY_BYTES, width, 128), padded(grid.block))
    softcap = asked.softcap
    sinks = None if asked.sinks is None else asked.sinks.contiguous()
    tiles = cdiv(grid.queries, tile)
    sizes = new, grid.length, grid.pad, grid.query_blocks, lists.shape[-1]
    strides = *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3]
    shapes = {
        "GROUPS": query_heads // heads,
        "SHARED": query_heads // counts.shape[1],
        "QUERIES": grid.queries,
        "KEYS": grid.block,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "HIDES": grid.pad > 0 or grid.block % block > 0,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
        "PADDED_DIM": padded(dim),
        "PADDED_VALUE_DIM": padded(value_dim),
        "ROWS": tile,
        "TILES": tiles,
        "BLOCK": block,
        "STEPS": cdiv(grid.block, block),
        "PRECISION": precision(query.dtype),
        "num_warps": 4,
        "num_stages": 2,
    }
    factors = float(asked.scale), 1.0 if softcap is None else float(softcap)
    with on(query):
        blocks_kernel[grid.query_blocks * tiles * query_heads, batch](
            query, keys, values, out, lists, counts, sinks, *factors, *sizes, *strides, heads, **shapes
        )
    return out.transpose(1, 2)
