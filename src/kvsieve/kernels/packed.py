"""Attention of one new token per row over encoded entries, which a kernel decodes as it reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvsieve.kernels.decode import Entries, attend
from kvsieve.kernels.inputs import PackedBlocks, Terms
from kvsieve.kernels.launch import PER_SM, cdiv, fitting, multiprocessors, on, padded, power_of_two, precision
from kvsieve.kernels.split import capped, merge_kernel, store_part

# Bytes of the entries that a program decodes at a time, in float32: what they become lies in shared memory.
_BYTES = 32 << 10
# Parts of a KV row that are merged at a time.
_MERGED = 32


def exact_decode(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, valid: Tensor | None, terms: Terms | None
) -> tuple[Tensor, Tensor]:
    """Attention over the entries beside the encoded ones; the last of them is seen, padding or not.

    Args:
        query: [B * H, G, D].
        keys: [B, H, N, D], a view of a larger buffer or not.
        values: [B, H, N, Dv], a view of a larger buffer or not.
        scale: factor of the query-key products.
        valid: bool [B, H or 1, N], False for padding; None when all entries are real.
        terms: cap; None for none.

    Returns:
        Output [B * H, G, Dv] and log-sum-exp float32 [B * H, G].
    """
    mask = None if valid is None else valid.expand(-1, keys.shape[1], -1)
    return attend(query, keys, values, Entries(keys.shape[2], keys.shape[2]), scale=scale, mask=mask, terms=terms)


def packed_decode(
    query: Tensor,
    base: Tensor | None,
    table: Tensor,
    fills: Tensor,
    keys: PackedBlocks,
    values: PackedBlocks,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over encoded entries.

    Args:
        query: float32 [R, G, D], scaled, and turned as the keys are.
        base: float32 [R, G], added to every logit of a query; None for nothing.
        table: int64 [R, M], blocks of each KV row.
        fills: int64 [R, M], entries of each block.
        keys: what the blocks lie in.
        values: what the blocks lie in.
        softcap: of the logits; None for none.

    Returns:
        Output float32 [R, G, Dv], turned as the values are, and log-sum-exp float32 [R, G].
    """
    rows, groups, dim = query.shape
    per_row, wide = table.shape[1], values.dim
    per = cdiv(rows * per_row, PER_SM * multiprocessors(query.device))
    parts = cdiv(per_row, per)
    of_parts, of_norms = query.new_empty(rows, parts, groups, wide), query.new_empty(rows, parts, groups)
    sizes = {"PADDED_GROUPS": padded(groups), "PADDED_DIM": padded(dim), "PADDED_VALUE_DIM": padded(wide)}
    with on(query):
        packed_kernel[rows, parts](
            query.contiguous(),
            base if base is None else base.contiguous(),
            table.contiguous(),
            fills.contiguous(),
            *(keys.packed, keys.scale, keys.zero, keys.levels),
            *(values.packed, values.scale, values.zero, values.levels),
            of_parts,
            of_norms,
            1.0 if softcap is None else float(softcap),
            per_row,
            per,
            TOKENS=keys.packed.shape[1],
            BASE=base is not None,
            SOFTCAP=softcap is not None,
            GROUPS=groups,
            DIM=dim,
            VALUE_DIM=wide,
            **_format("KEY", keys),
            **_format("VALUE", values),
            **sizes,
            BLOCK=fitting(_BYTES, (padded(dim) + padded(wide)) * 4, padded(keys.packed.shape[1])),
            PRECISION=precision(torch.float32),
            num_warps=4,
            num_stages=2,
        )
    return (of_parts[:, 0], of_norms[:, 0]) if parts == 1 else _merged(of_parts, of_norms)


def _merged(of_parts: Tensor, of_norms: Tensor) -> tuple[Tensor, Tensor]:
    """Output [R, G, Dv] and log-sum-exp [R, G] of all parts [R, S, G, Dv] and [R, S, G]."""
    rows, parts, groups, wide = of_parts.shape
    out, norm = of_parts.new_empty(rows, groups, wide), of_norms.new_empty(rows, groups)
    sizes = {"PADDED_PARTS": power_of_two(parts), "PADDED_VALUE_DIM": padded(wide), "BLOCK": _MERGED, "num_warps": 4}
    with on(out):
        merge_kernel[rows, groups](
            *(of_parts, of_norms, out, norm, None, parts, 1), GROUPS=groups, VALUE_DIM=wide, SINKS=False, **sizes
        )
    return out, norm


def _format(name: str, blocks: PackedBlocks) -> dict[str, object]:
    facts = {
        "BITS": blocks.bits,
        "BYTES": blocks.packed.shape[2],
        "GROUP": blocks.group,
        "ZERO": blocks.zero is not None,
        "LEVELS": blocks.levels is not None,
    }
    return {f"{name}_{fact}": value for fact, value in facts.items()}


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
            # There is an entry, so something is the greatest.
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
    """Numbers float32 [entries, channels] of a block; `entry`: their numbers in the pool."""
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
    """Codes of channels, from planes of 4, 2 and 1 bits, high bits first; `row`: where an entry's bytes begin."""
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
