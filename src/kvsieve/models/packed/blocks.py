"""Weights packed into the blocks of GGUF: Q8_0 and Q5_0 by their rounding rules, Q4_K by a search."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsieve.kernels.cpu.quantized import FORMATS

# Weights packed at a time: enough for all cores, and few enough for temporaries to stay in the processor's cache.
_PART = 1 << 18
# Levels that the range of a sub-block of Q4_K is divided into by the scales that the search starts from.
_LEVELS = (13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 16.5)
_SUB = 32


def pack(weight: Tensor, kind: str) -> Tensor:
    """Pack a weight [C, D] into blocks: uint8 [C, bytes of a row].

    Args:
        weight: finite; D divides by the format's numbers per block.
        kind: "Q8_0", "Q5_0" or "Q4_K".
    """
    layout = FORMATS[kind]
    packed = torch.empty(weight.numel() // layout.size, layout.nbytes, dtype=torch.uint8)
    count = _PART // layout.size
    for at, part in enumerate(weight.reshape(-1, layout.size).split(count)):
        packed[at * count : at * count + len(part)] = _PACKERS[kind](part.float())
    return packed.view(len(weight), -1)


def _q8_0(blocks: Tensor) -> Tensor:
    """Scale: the largest magnitude over 127, float16. Halves are rounded away from zero, before the scale is."""
    scale = blocks.abs().amax(1, keepdim=True) / 127
    magnitude = blocks.abs() * _inverse(scale)
    whole = magnitude.floor()
    whole += ((magnitude - whole) * 2).floor()
    return torch.cat([_bytes(scale), (whole * blocks.sign()).to(torch.int8).view(torch.uint8)], 1)


def _q5_0(blocks: Tensor) -> Tensor:
    """Scale: the weight of the largest magnitude over -16, float16; integers from -16 to 15, fifth bits together."""
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -16
    whole = (blocks * _inverse(scale) + 16.5).clamp_(max=31).to(torch.uint8)
    high = (whole >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    low = whole & 15
    return torch.cat([_bytes(scale), high.sum(2, dtype=torch.uint8), low[:, :16] | low[:, 16:] << 4], 1)


def _q4_k(blocks: Tensor) -> Tensor:
    """Eight sub-blocks with scales and minima of 6 bits, in units of two float16 numbers of the block.

    A weight is `scale * integer - minimum`, the integer from 0 to 15. Errors count more for large weights, which
    contribute more to a product.
    """
    values = blocks.view(-1, 8, _SUB)
    rms = values.square().mean((1, 2), keepdim=True).sqrt_()
    importance = values.abs().add_(rms)
    scale, minimum = _searched(values, importance)
    units = torch.stack([scale.amax(1), minimum.amax(1)], 1).div_(63).half()
    found = _in_units(values, importance, scale, minimum, units)
    refitted = _refitted_units(values, importance, found, units)
    again = _in_units(values, importance, scale, minimum, refitted)
    better = again[3].sum(1) < found[3].sum(1)
    units = torch.where(better[:, None], refitted, units)
    scales, minima, whole = (torch.where(better[:, None, None], again[part], found[part]) for part in range(3))
    pairs = whole.to(torch.uint8).view(-1, 4, 2, _SUB)
    integers = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    return torch.cat([units.view(torch.uint8), _six_bits(scales, minima), integers], 1)


def _searched(values: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum [N, 8] of each sub-block with the smallest weighted squared error.

    Each candidate divides the sub-block's range into a number of levels and rounds; scale and minimum are then fitted
    to the integers by weighted least squares. Minima are at least 0, as the format has them.
    """
    minimum = values.amin(2, keepdim=True).clamp_(max=0).neg_()
    span = values.amax(2, keepdim=True).add_(minimum).clamp_(min=0)
    weights = importance.sum(2)
    weighted = importance * values
    total = weighted.sum(2)
    best = torch.full_like(total, float("inf"))
    scales = torch.zeros_like(total)
    minima = torch.zeros_like(total)
    shifted = values + minimum
    for levels in _LEVELS:
        whole = (shifted * (levels * _inverse(span))).round_().clamp_(0, 15)
        product = importance * whole
        first = product.sum(2)
        second = product.mul_(whole).sum(2)
        mixed = whole.mul_(weighted).sum(2)
        scale, offset = _fit(weights, first, second, mixed, total)
        # Squared error, less the same constant for all candidates.
        error = scale.square() * second + offset.square() * weights
        error += 2 * (scale * offset * first - scale * mixed - offset * total)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        minima = torch.where(better, -offset, minima)
    return scales, minima


def _fit(weights: Tensor, first: Tensor, second: Tensor, mixed: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale (at least 0) and offset (at most 0) that fit weighted numbers best.

    Args:
        weights: sums [N, 8] of the weights.
        first: of weights times integers.
        second: of weights times squared integers.
        mixed: of weights times integers times numbers.
        total: of weights times numbers.
    """
    determinant = (weights * second - first.square()).clamp_(min=0)
    offset = (second * total - first * mixed) * _inverse(determinant)
    alone = determinant <= weights * second * 1e-6
    offset = torch.where(alone & (second == 0), total * _inverse(weights), offset.masked_fill(alone, 0)).clamp_(max=0)
    return ((mixed - offset * first) * _inverse(second)).clamp_(min=0), offset


def _in_units(
    values: Tensor, importance: Tensor, scale: Tensor, minimum: Tensor, units: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scales and minima in whole units [N, 8, 1], the integers [N, 8, 32], and the errors [N, 8].

    The scale's neighbours are tried too, each with the minimum that fits its integers.

    Args:
        values: [N, 8, 32].
        importance: [N, 8, 32], weights of the errors.
        scale: [N, 8], wanted.
        minimum: [N, 8], wanted.
        units: [N, 2], float16, of scales and minima.
    """
    unit, minimum_unit = (units.float()[:, at, None, None] for at in (0, 1))
    middle = (scale[..., None] * _inverse(unit)).round_()
    wanted = minimum[..., None]
    weights = importance.sum(2, keepdim=True)
    weighted = importance * values
    best: tuple[Tensor, ...] = ()
    for step in (0, -1, 1):
        whole_scale = (middle + step).clamp_(0, 63)
        factor = whole_scale * unit
        whole = _integers(values, factor, wanted)
        fitted = ((importance * whole).sum(2, keepdim=True) * factor - weighted.sum(2, keepdim=True)) / weights
        whole_minimum = (fitted * _inverse(minimum_unit)).round_().clamp_(0, 63)
        least = whole_minimum * minimum_unit
        whole = _integers(values, factor, least)
        error = (whole * factor).sub_(least).sub_(values).square_().mul_(importance).sum(2)
        found = (whole_scale, whole_minimum, whole, error)
        if not best:
            best = found
            continue
        better = error < best[3]
        parts = (torch.where(better[..., None], found[part], best[part]) for part in range(3))
        best = (*parts, error.minimum(best[3]))
    return best[0], best[1], best[2], best[3]


def _refitted_units(values: Tensor, importance: Tensor, found: tuple[Tensor, ...], units: Tensor) -> Tensor:
    """Return the units [N, 2], float16, that fit a block's whole scales, minima and integers best."""
    by_scale = found[0] * found[2]
    weighted = importance * by_scale
    negative = -found[1]
    sums = [
        (importance * negative.square()).sum((1, 2)),
        (weighted * negative).sum((1, 2)),
        (weighted * by_scale).sum((1, 2)),
        (weighted * values).sum((1, 2)),
        (importance * negative * values).sum((1, 2)),
    ]
    least, cross, most, mixed, total = sums
    determinant = most * least - cross.square()
    inverse = _inverse(determinant)
    fitted = torch.stack([(mixed * least - total * cross) * inverse, (total * most - mixed * cross) * inverse], 1)
    usable = (determinant > most * least * 1e-4) & (fitted > 0).all(1)
    return torch.where(usable[:, None], fitted.half(), units)


def _integers(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((values + minimum) * _inverse(scale)).round_().clamp_(0, 15)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack scales and minima [N, 8, 1] into 12 bytes.

    Four bytes with the first four scales, four with the first four minima, four with the low halves of the last four of
    both; the upper two bits of these are the upper two bits of the first eight bytes.
    """
    first, last = scales.squeeze(2).to(torch.uint8).split(4, 1)
    first_minima, last_minima = minima.squeeze(2).to(torch.uint8).split(4, 1)
    upper = [first | last >> 4 << 6, first_minima | last_minima >> 4 << 6]
    return torch.cat([*upper, last & 15 | (last_minima & 15) << 4], 1)


def _inverse(numbers: Tensor) -> Tensor:
    """Return 1 / x, and 0 for 0."""
    return torch.where(numbers == 0, 0, 1 / numbers)


def _bytes(scale: Tensor) -> Tensor:
    return scale.half().view(torch.uint8)


_PACKERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q5_0": _q5_0, "Q4_K": _q4_k}
