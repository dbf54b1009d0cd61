"""Attention of one new token per row over codes of 2, 4 or 8 bits, multiplied by tensor cores as stored.

Two bytes are read as one 16-bit number. Masked to one code and seen as a float16, it is the code times 2 ** -24 (times
2, 4 ... at higher positions): below 1024 float16 is evenly spaced, without an exponent. Tensor cores multiply such
numbers exactly, so nothing is converted. The codes at one position of all numbers are a plane: an operand of a dot, and
every second channel of a range. Scales never touch a code: they multiply the query or the logits, and the weights or
the sums. The other operand of each dot, a float32, is split into two float16 numbers, rows of one dot, with a 22-bit
sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsieve.kernels.packed_parts import codes_at, first_channel, no_sums, ranges_kept, stacked, summed, twice
from kvsieve.kernels.split import capped


@triton.jit(do_not_specialize=["per_row", "per"])
def planes_kernel(
    query,
    base,
    table,
    fills,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
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
    KEY_GROUP: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * per
    last = tl.minimum(first + per, per_row)
    group = tl.arange(0, ROWS)
    q, size = _query(query + row * (GROUPS * DIM), group, GROUPS, DIM, KEY_BITS, KEY_COLUMNS, KEY_PADDED)
    # In units of log 2, as all logits.
    added = tl.full([ROWS], 0.0, tl.float32)
    if BASE:
        added = tl.load(base + row * GROUPS + group, mask=group < GROUPS, other=0.0) * 1.4426950408889634
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    # One per position in a block, so that nothing is summed over threads before the end.
    total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    sums = no_sums(VALUE_DIM // VALUE_COLUMNS, 2 * ROWS, VALUE_PADDED)
    zeros = no_sums(ranges_kept(VALUE_DIM, VALUE_GROUP, VALUE_COLUMNS) if VALUE_ZERO else 0, ROWS, BLOCK)
    STEPS: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    for step in range(first * STEPS, last * STEPS):
        block = tl.load(table + row * per_row + step // STEPS)
        fill = tl.load(fills + row * per_row + step // STEPS).to(tl.int32)
        token = step % STEPS * BLOCK + tl.arange(0, BLOCK)
        real = token < fill
        entry = block * TOKENS + token
        logits = _logits(
            q, size, key_codes, key_scale, key_zero, block, entry, real,
            DIM, KEY_BITS, KEY_GROUP, KEY_ZERO, KEY_COLUMNS, KEY_PADDED, ROWS, BLOCK,
        )  # fmt: skip
        logits += added[:, None]
        logits = capped(logits, softcap * 1.4426950408889634) if SOFTCAP else logits
        logits = tl.where(real[None, :], logits, float("-inf"))
        higher = tl.maximum(greatest, tl.max(logits, 1))
        # Blocks beyond a row's last entry are empty.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - finite[:, None])
        shrink = tl.exp2(greatest - finite)
        total = total * shrink[:, None] + weights
        sums, zeros = _added(
            sums, zeros, weights, shrink, value_codes, value_scale, value_zero, block, entry, real,
            VALUE_DIM, VALUE_BITS, VALUE_GROUP, VALUE_ZERO, VALUE_COLUMNS, VALUE_PADDED, ROWS,
        )  # fmt: skip
        greatest = higher
    place = (row * tl.num_programs(1) + part) * GROUPS + group
    _store(
        out, norm, place, group < GROUPS, greatest, tl.sum(total, 1), sums, zeros,
        VALUE_DIM, VALUE_BITS, VALUE_GROUP, VALUE_ZERO, VALUE_COLUMNS, VALUE_PADDED, ROWS,
    )  # fmt: skip


@triton.jit
def _query(
    query, group, GROUPS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Return the query's planes, divided by the greatest number of each row, and that number."""
    column = tl.arange(0, PADDED)
    FIELDS: tl.constexpr = 8 // BITS
    found = ()
    size = tl.full([group.shape[0]], 0.0, tl.float32)
    for chunk in tl.static_range(DIM // FIELDS // 2 // COLUMNS):
        for field in tl.static_range(FIELDS):
            for side in tl.static_range(2):
                channel = first_channel(chunk, field, side, DIM, BITS, COLUMNS) + 2 * column
                part = tl.load(
                    query + group[:, None] * DIM + channel[None, :],
                    mask=(group < GROUPS)[:, None] & (column < COLUMNS)[None, :],
                    other=0.0,
                )
                found += (part,)
                size = tl.maximum(size, tl.max(tl.abs(part), 1))
    size = tl.where(size > 0, size, 1.0)
    divided = ()
    for plane in tl.static_range(DIM // COLUMNS):
        divided += (found[plane] / size[:, None],)
    return divided, size


@triton.jit
def _logits(
    q, size, codes, scale, zero, block, entry, real,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the products of the query and the keys in units of log 2 [ROWS, BLOCK]."""
    column = tl.arange(0, PADDED)
    logits = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    ALONE: tl.constexpr = (GROUP > 0) & (GROUP < DIM)
    raw = tl.full([2 * ROWS, BLOCK], 0.0, tl.float32)
    products = tl.full([ROWS, PADDED], 0.0, tl.float32)
    FIELDS: tl.constexpr = 8 // BITS
    for chunk in tl.static_range(DIM // FIELDS // 2 // COLUMNS):
        at = entry[None, :] * (DIM // FIELDS // 2) + (chunk * COLUMNS + column)[:, None]
        two = tl.load(codes + at, mask=real[None, :] & (column < COLUMNS)[:, None], other=0)
        for field in tl.static_range(FIELDS):
            for side in tl.static_range(2):
                if GROUP == 0:
                    here = block * DIM + first_channel(chunk, field, side, DIM, BITS, COLUMNS) + 2 * column
                    factor = tl.load(scale + here, mask=column < COLUMNS, other=0.0).to(tl.float32)
                    rows = stacked(q[(chunk * FIELDS + field) * 2 + side] * (factor * (0.5 ** (field * BITS)))[None, :])
                    if ZERO:
                        offset = tl.load(zero + here, mask=column < COLUMNS, other=0.0).to(tl.float32)
                        products += q[(chunk * FIELDS + field) * 2 + side] * offset[None, :]
                else:
                    rows = stacked(q[(chunk * FIELDS + field) * 2 + side] * (0.5 ** (field * BITS)))
                    products += q[(chunk * FIELDS + field) * 2 + side]
                raw = tl.dot(rows, codes_at(two, side * 8 + field * BITS, BITS), raw)
            if ALONE:
                at_group = entry * (DIM // GROUP) + first_channel(chunk, field, 0, DIM, BITS, COLUMNS) // GROUP
                logits += _of_tokens(raw, products, scale, zero, at_group, real, ZERO, ROWS)
                raw = tl.full([2 * ROWS, BLOCK], 0.0, tl.float32)
                products = tl.full([ROWS, PADDED], 0.0, tl.float32)
    if GROUP == DIM:
        logits = _of_tokens(raw, products, scale, zero, entry, real, ZERO, ROWS)
    if GROUP == 0:
        logits = summed(raw, ROWS) * 16777216.0 + tl.sum(products, 1)[:, None]
    return logits * (size * 1.4426950408889634)[:, None]


@triton.jit
def _of_tokens(raw, products, scale, zero, at, real, ZERO: tl.constexpr, ROWS: tl.constexpr):
    """Apply the tokens' scales to products; products: sums of the query over these channels."""
    found = summed(raw, ROWS) * (tl.load(scale + at, mask=real, other=0.0).to(tl.float32) * 16777216.0)[None, :]
    if ZERO:
        found += tl.sum(products, 1)[:, None] * tl.load(zero + at, mask=real, other=0.0).to(tl.float32)[None, :]
    return found


@triton.jit
def _added(
    sums, zeros, weights, shrink, codes, scale, zero, block, entry, real,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add a block's values to the sums of values and of weights times zeros."""
    column = tl.arange(0, PADDED)
    both = twice(shrink)[:, None]
    new_sums = ()
    new_zeros = ()
    FIELDS: tl.constexpr = 8 // BITS
    rows = stacked(weights)
    for chunk in tl.static_range(DIM // FIELDS // 2 // COLUMNS):
        at = entry[:, None] * (DIM // FIELDS // 2) + (chunk * COLUMNS + column)[None, :]
        two = tl.load(codes + at, mask=real[:, None] & (column < COLUMNS)[None, :], other=0)
        for field in tl.static_range(FIELDS):
            if GROUP > 0 and (chunk + field == 0 or GROUP < DIM):
                at_group = entry * (DIM // GROUP) + first_channel(chunk, field, 0, DIM, BITS, COLUMNS) // GROUP
                rows = stacked(weights * tl.load(scale + at_group, mask=real, other=0.0).to(tl.float32)[None, :])
                if ZERO:
                    offset = tl.load(zero + at_group, mask=real, other=0.0).to(tl.float32)
                    new_zeros += (zeros[chunk * FIELDS + field] * shrink[:, None] + weights * offset[None, :],)
            for side in tl.static_range(2):
                plane = codes_at(two, side * 8 + field * BITS, BITS)
                if GROUP == 0:
                    here = block * DIM + first_channel(chunk, field, side, DIM, BITS, COLUMNS) + 2 * column
                    factor = tl.load(scale + here, mask=column < COLUMNS, other=0.0).to(tl.float32)
                    new = tl.dot(rows, plane) * (factor * 2.0 ** (24 - field * BITS))[None, :]
                    if ZERO:
                        offset = tl.load(zero + here, mask=column < COLUMNS, other=0.0).to(tl.float32)
                        new += tl.sum(rows.to(tl.float32), 1)[:, None] * offset[None, :]
                    new_sums += (sums[(chunk * FIELDS + field) * 2 + side] * both + new,)
                else:
                    new_sums += (tl.dot(rows, plane, sums[(chunk * FIELDS + field) * 2 + side] * both),)
    return new_sums, new_zeros


@triton.jit
def _store(
    out, norm, place, there, greatest, total, sums, zeros,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a part's output and log-sum-exp; a total of 0 means that the part had no visible entries."""
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    log_sum = (greatest + tl.log2(divisor)) * 0.6931471805599453
    tl.store(norm + place, tl.where(some, log_sum, float("-inf")), mask=there)
    column = tl.arange(0, PADDED)
    FIELDS: tl.constexpr = 8 // BITS
    for chunk in tl.static_range(DIM // FIELDS // 2 // COLUMNS):
        for field in tl.static_range(FIELDS):
            for side in tl.static_range(2):
                found = summed(sums[(chunk * FIELDS + field) * 2 + side], ROWS)
                if GROUP > 0:
                    found *= 2.0 ** (24 - field * BITS)
                if ZERO and GROUP > 0:
                    found += tl.sum(zeros[0 if GROUP == DIM else chunk * FIELDS + field], 1)[:, None]
                channel = first_channel(chunk, field, side, DIM, BITS, COLUMNS) + 2 * column
                tl.store(
                    out + place[:, None] * DIM + channel[None, :],
                    found / divisor[:, None],
                    mask=there[:, None] & (column < COLUMNS)[None, :],
                )
