"""Parts of kernels.packed_planes: planes of codes as operands of a dot, and float32 numbers as two of float16."""

from __future__ import annotations

import triton
import triton.language as tl

# Under Triton's interpreter there is no assembly.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def codes_at(two, AT: tl.constexpr, BITS: tl.constexpr):
    """Return the codes at bit AT as float16: times 2 ** (AT % 8 - 24)."""
    if _INTERPRETED:
        return ((two >> (AT // 8 * 8)) & (((1 << BITS) - 1) << (AT % 8))).to(tl.float16, bitcast=True)
    # Two numbers per instruction: bits shifted from one into the other are masked.
    if AT >= 8:
        two = tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [two], tl.int16, True, 2)
    return tl.inline_asm_elementwise(_masking(AT, BITS), "=r,r", [two], tl.float16, True, 2)


@triton.constexpr_function
def _masking(at, bits):
    return f"and.b32 $0, $1, {(((1 << bits) - 1) << (at % 8)) * 65537};"


@triton.jit
def stacked(x):
    """Return float16 [2 * rows, columns]: x rounded, then the rounding error times 2048."""
    high = x.to(tl.float16)
    low = ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)
    return tl.reshape(tl.permute(tl.join(high, low), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit
def summed(x, ROWS: tl.constexpr):
    high, low = tl.split(tl.permute(tl.reshape(x, [2, ROWS, x.shape[1]]), (1, 2, 0)))
    return high + low * (1.0 / 2048.0)


@triton.jit
def twice(x):
    """Repeat a number per row for stacked rows."""
    return tl.reshape(tl.permute(tl.join(x, x), (1, 0)), [2 * x.shape[0]])


@triton.jit
def no_sums(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.full([ROWS, COLUMNS], 0.0, tl.float32),)
    return sums


@triton.constexpr_function
def first_channel(chunk, field, side, dim, bits, columns):
    """Return the first channel of a plane; the others follow with stride 2."""
    return field * (dim * bits // 8) + chunk * 2 * columns + side


@triton.constexpr_function
def ranges_kept(dim, group, columns):
    """Return how many sums of weights times zeros are stored."""
    return 0 if group == 0 else 1 if group == dim else dim // (2 * columns)
