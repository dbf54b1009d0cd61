"""Attention mass that a window of queries gives to every stored entry, and its pooling.

Two passes over a KV head's keys: the first finds the log-sum-exp of each of the window's rows, split along the entries
and merged; the second recomputes the logits in tiles that never leave the chip, and sums their weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels.inputs import Queries
from kvsieve.kernels.launch import PER_SM, cdiv, fitting, multiprocessors, on, padded, precision, rows
from kvsieve.kernels.split import capped

# Bytes of a tile of queries and of one of keys: 128 rows and 64 or 128 entries of 128 bfloat16 channels.
_QUERY_BYTES = 32 << 10
_KEY_BYTES = 16 << 10
# Entries that a program pools.
_POOLED = 1024


@triton.jit(do_not_specialize=["length", "per", "valid_row", "valid_head"])
def norm_kernel(
    query,
    keys,
    valid,
    norm,
    scale,
    softcap,
    length,
    window,
    per,
    query_row,
    query_head,
    query_slot,
    key_row,
    key_head,
    key_slot,
    valid_row,
    valid_head,
    heads,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    part = tl.program_id(1)
    kv_row = tl.program_id(2).to(tl.int64)
    row = kv_row // heads
    head = kv_row % heads
    # A head's rows run over its groups first, then over the window.
    at_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = at_row % window
    dim = tl.arange(0, PADDED_DIM)
    own = head * GROUPS + at_row // window
    q = tl.load(
        query + row * query_row + own[:, None] * query_head + number[:, None].to(tl.int64) * query_slot + dim[None, :],
        mask=(at_row < GROUPS * window)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    keys += row * key_row + head * key_head
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    first = part * per
    last = tl.minimum(first + per, length)
    for at in range(first, last, BLOCK):
        index = at + tl.arange(0, BLOCK)
        real = index < last
        k = tl.load(
            keys + index[:, None].to(tl.int64) * key_slot + dim[None, :],
            mask=real[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        # In units of log 2.
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
        if SOFTCAP:
            logits = capped(logits, softcap * 1.4426950408889634)
        if VALID:
            there = tl.load(valid + row * valid_row + head * valid_head + index, mask=real, other=0)
            real = real & (there != 0)
        seen = real[None, :] & (index[None, :] <= (length - window + number)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(greatest, tl.max(logits, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(greatest - finite) + tl.sum(tl.exp2(logits - finite[:, None]), 1)
        greatest = higher
    some = total > 0
    tl.store(
        norm + (kv_row * tl.num_programs(1) + part) * (GROUPS * window) + at_row,
        tl.where(some, (greatest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf")),
        mask=at_row < GROUPS * window,
    )


@triton.jit(do_not_specialize=["length", "valid_row", "valid_head"])
def mass_kernel(
    query,
    keys,
    valid,
    norm,
    mass,
    scale,
    softcap,
    length,
    window,
    query_row,
    query_head,
    query_slot,
    key_row,
    key_head,
    key_slot,
    valid_row,
    valid_head,
    heads,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_row = tl.program_id(1).to(tl.int64)
    row = kv_row // heads
    head = kv_row % heads
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, PADDED_DIM)
    real = index < length
    k = tl.load(
        keys + row * key_row + head * key_head + index[:, None].to(tl.int64) * key_slot + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    if VALID:
        valid += row * valid_row + head * valid_head
        real = real & (tl.load(valid + index, mask=real, other=0) != 0)
    corner = length - window
    for group in range(GROUPS):
        total = tl.full([BLOCK], 0.0, tl.float32)
        for first in range(0, window, ROWS):
            number = first + tl.arange(0, ROWS)
            inside = number < window
            q = tl.load(
                query
                + row * query_row
                + (head * GROUPS + group) * query_head
                + number[:, None].to(tl.int64) * query_slot
                + dim[None, :],
                mask=inside[:, None] & (dim < DIM)[None, :],
                other=0.0,
            )
            level = tl.load(norm + (kv_row * GROUPS + group) * window + number, mask=inside, other=float("-inf"))
            if VALID:
                inside = inside & (tl.load(valid + corner + number, mask=inside, other=0) != 0)
            inside = inside & (level > float("-inf"))
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
            if SOFTCAP:
                logits = capped(logits, softcap)
            seen = real[:, None] & inside[None, :] & (index[:, None] <= (corner + number)[None, :])
            weights = tl.exp2((logits - tl.where(inside, level, 0.0)[None, :]) * 1.4426950408889634)
            total += tl.sum(tl.where(seen, weights, 0.0), 1)
        tl.store(mass + (kv_row * GROUPS + group) * length + index, total, mask=index < length)


@triton.jit(do_not_specialize=["length", "mass_row", "mass_head"])
def pool_kernel(
    mass,
    out,
    length,
    mass_row,
    mass_head,
    heads,
    GROUPS: tl.constexpr,
    KERNEL: tl.constexpr,
    GREATEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    kv_row = tl.program_id(1).to(tl.int64)
    mass += kv_row // heads * mass_row + kv_row % heads * GROUPS * mass_head
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for _ in range(GROUPS):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for offset in range(KERNEL):
            at = index + offset - KERNEL // 2
            inside = (at >= 0) & (at < length)
            if GREATEST:
                best = tl.maximum(best, tl.load(mass + at, mask=inside, other=float("-inf")))
            else:
                total += tl.load(mass + at, mask=inside, other=0.0)
        if GREATEST:
            total += best
        mass += mass_head
    divisor = GROUPS if GREATEST else GROUPS * KERNEL
    tl.store(out + kv_row * length + index, total / divisor, mask=index < length)


def window_mass(asked: Queries, keys: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the attention mass that a window of queries gives to every entry, float32 [B, Hq, N].

    Arguments as in `core.scoring.window_mass`; queries and keys may be views of larger buffers.
    """
    batch, query_heads, window, dim = asked.query.shape
    heads = keys.shape[1]
    length = keys.shape[2]
    groups = query_heads // heads
    kv_rows = batch * heads
    query = rows(asked.query)
    keys = rows(keys)
    if valid is not None:
        valid = rows(valid.view(torch.uint8)).expand(batch, heads, -1)
    width = padded(dim)
    channels = width * keys.element_size()
    block = fitting(_KEY_BYTES, channels, 128)
    tile = min(fitting(_QUERY_BYTES, channels, 128), padded(groups * window))
    tiles = cdiv(groups * window, tile)
    share = cdiv(tiles * kv_rows * length, PER_SM * multiprocessors(query.device))
    per = cdiv(share, block) * block
    parts = cdiv(length, per)
    norm = query.new_empty(kv_rows, parts, groups * window, dtype=torch.float32)
    mass = query.new_empty(batch, query_heads, length, dtype=torch.float32)
    strides = (
        *query.stride()[:3],
        *keys.stride()[:3],
        *((0, 0) if valid is None else valid.stride()[:2]),
        heads,
    )
    shapes = {
        "GROUPS": groups,
        "DIM": dim,
        "VALID": valid is not None,
        "SOFTCAP": asked.softcap is not None,
        "PADDED_DIM": width,
        "BLOCK": block,
        "PRECISION": precision(query.dtype),
        "num_warps": 4,
    }
    softcap = 1.0 if asked.softcap is None else float(asked.softcap)
    facts = float(asked.scale), softcap, length, window
    with on(query):
        norm_kernel[tiles, parts, kv_rows](
            query, keys, valid, norm, *facts, per, *strides, ROWS=tile, num_stages=3, **shapes
        )
        norm = norm.logsumexp(1)
        if asked.sinks is not None:
            view = norm.view(batch, heads, groups, window)
            norm = torch.logaddexp(view, asked.sinks.float().view(heads, groups, 1)).view(norm.shape)
        tile = min(tile, padded(window), 64)
        mass_kernel[cdiv(length, block), kv_rows](
            query, keys, valid, norm, mass, *facts, *strides, ROWS=tile, num_stages=2, **shapes
        )
    return mass


def pooled(mass: Tensor, heads: int, kernel: int, pooling: str) -> Tensor:
    """Pool as `core.scoring.pool` does, then average over the query heads of each of `heads`.

    Args:
        mass: [B, Hq, M].
        heads: of the result.
        kernel: width, odd.
        pooling: "avg" or "max".

    Returns:
        float32 [B, heads, M].
    """
    batch, query_heads, length = mass.shape
    mass = rows(mass)
    out = mass.new_empty(batch, heads, length)
    with on(mass):
        pool_kernel[cdiv(length, _POOLED), batch * heads](
            mass,
            out,
            length,
            mass.stride(0),
            mass.stride(1),
            heads,
            GROUPS=query_heads // heads,
            KERNEL=kernel,
            GREATEST=pooling == "max",
            BLOCK=_POOLED,
            num_warps=4,
        )
    return out
