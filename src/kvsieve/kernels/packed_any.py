"""Attention of one new token per row over encoded entries of any format, decoded to float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kvsieve.kernels.split import capped, store_part


@triton.jit(do_not_specialize=["per_row", "per"])
def packed_kernel(
    query,
    base,
    table,
    fills,
    key_codes,
    key_scale,
    key_zero,
    key_levels,
    value_codes,
    value_scale,
    value_zero,
    value_levels,
    out,
    norm,
    softcap,
    per_row,
    per,
    TOKENS: tl.constexpr,
    BASE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * per
    last = tl.minimum(first + per, per_row)
    group = tl.arange(0, PADDED_GROUPS)
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    q = tl.load(
        query + row * (GROUPS * DIM) + group[:, None] * DIM + dim[None, :],
        mask=(group < GROUPS)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    added = tl.full([PADDED_GROUPS], 0.0, tl.float32)
    if BASE:
        added = tl.load(base + row * GROUPS + group, mask=group < GROUPS, other=0.0)
    greatest = tl.full([PADDED_GROUPS], float("-inf"), tl.float32)
    total = tl.full([PADDED_GROUPS], 0.0, tl.float32)
    sums = tl.full([PADDED_GROUPS, PADDED_VALUE_DIM], 0.0, tl.float32)
    for number in range(first, last):
        block = tl.load(table + row * per_row + number)
        fill = tl.load(fills + row * per_row + number).to(tl.int32)
        for start in range(0, fill, BLOCK):
            token = start + tl.arange(0, BLOCK)
            real = token < fill
            entry = block * TOKENS + token
            k = _decoded(
                key_codes, key_scale, key_zero, key_levels, block, entry, dim, real,
                DIM, KEY_BITS, KEY_BYTES, KEY_GROUP, KEY_ZERO, KEY_LEVELS,
            )  # fmt: skip
            # In units of log 2.
            logits = (tl.dot(q, tl.trans(k), input_precision=PRECISION) + added[:, None]) * 1.4426950408889634
            logits = capped(logits, softcap * 1.4426950408889634) if SOFTCAP else logits
            logits = tl.where(real[None, :], logits, float("-inf"))
            # There is an entry, so a greatest logit exists.
            higher = tl.maximum(greatest, tl.max(logits, 1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(greatest - higher)
            total = total * shrink + tl.sum(weights, 1)
            v = _decoded(
                value_codes, value_scale, value_zero, value_levels, block, entry, value_dim, real,
                VALUE_DIM, VALUE_BITS, VALUE_BYTES, VALUE_GROUP, VALUE_ZERO, VALUE_LEVELS,
            )  # fmt: skip
            sums = sums * shrink[:, None] + tl.dot(weights, v, input_precision=PRECISION)
            greatest = higher
    place = (row * tl.num_programs(1) + part) * GROUPS + group
    store_part(out, norm, place, value_dim, group < GROUPS, greatest, total, sums, None, 0, VALUE_DIM, False)


@triton.jit
def _decoded(
    codes, scale, zero, levels, block, entry, dim, real,
    DIM: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Decode a block to float32 [entries, channels]; `entry`: their indices in the pool."""
    seen = real[:, None] & (dim < DIM)[None, :]
    code = _unpacked(codes + entry[:, None] * BYTES, dim[None, :], seen, DIM, BITS)
    x = tl.load(levels + code, mask=seen, other=0.0) if LEVELS else code.to(tl.float32)
    if GROUP > 0:
        at = entry[:, None] * (DIM // GROUP) + (dim // GROUP)[None, :]
        there = seen
    else:
        at = (block * DIM + dim)[None, :]
        there = (dim < DIM)[None, :]
    x *= tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
    if ZERO:
        x += tl.load(zero + at, mask=there, other=0.0).to(tl.float32)
    return x


@triton.jit
def _unpacked(row, dim, seen, DIM: tl.constexpr, BITS: tl.constexpr):
    """Unpack codes of channels from planes of 4, 2 and 1 bits, high bits first; `row`: start of an entry's bytes."""
    if BITS == 8:
        return tl.load(row + dim, mask=seen, other=0).to(tl.int32)
    code = tl.where(seen, 0, 0)
    if BITS & 4:
        byte = tl.load(row + dim % (DIM // 2), mask=seen, other=0).to(tl.int32)
        code = (byte >> (dim // (DIM // 2) * 4)) & 15
    if BITS & 2:
        byte = tl.load(row + (BITS & 4) * DIM // 8 + dim % (DIM // 4), mask=seen, other=0).to(tl.int32)
        code = (code << 2) | ((byte >> (dim // (DIM // 4) * 2)) & 3)
    if BITS & 1:
        byte = tl.load(row + (BITS & 6) * DIM // 8 + dim % (DIM // 8), mask=seen, other=0).to(tl.int32)
        code = (code << 1) | ((byte >> (dim // (DIM // 8))) & 1)
    return code
