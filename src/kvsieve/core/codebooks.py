"""Codebooks: levels that a code stands for, and the scales that suit them."""

from __future__ import annotations

import functools
import itertools
import math

from kvsieve.core.codes import CodeFormat, level_tensor, nearest
from kvsieve.lazy import Tensor, torch

# Rounds of Lloyd's iteration: of 16 levels, none moves by more than 1e-12 any more.
_ROUNDS = 2000
# Scales that are tried, over the root mean square, since one alone may lead to codes that are only second best. Of 64
# channels the squared error is at most 1, 2 and 5% (2, 3 and 4 bits) above that of the best of 60.
_STARTS = (0.8, 0.9, 1.0, 1.1, 1.2)


@functools.cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
    """Levels of `bits` bits with the least mean squared error on the standard normal distribution (Lloyd, Max).

    Each level is the mean of the numbers nearest to it; ascending, symmetric about 0.
    """
    half = 1 << (bits - 1)
    levels = [(at + 0.5) * 4 / (1 << bits) for at in range(half)]
    for _ in range(_ROUNDS):
        borders = [0.0, *((low + high) / 2 for low, high in itertools.pairwise(levels)), math.inf]
        before = levels
        levels = [_mean(low, high) for low, high in itertools.pairwise(borders)]
        if max(abs(new - old) for new, old in zip(levels, before, strict=True)) < 1e-12:
            break
    return (*(-level for level in reversed(levels)), *levels)


def _mean(low: float, high: float) -> float:
    """Mean of the standard normal distribution between two numbers, 0 <= low < high."""
    density = math.exp(-low * low / 2) - math.exp(-high * high / 2)
    mass = math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))
    return density / mass * math.sqrt(2 / math.pi)


@functools.cache
def float8_levels() -> tuple[float, ...]:
    """Numbers of the 8 bit float e4m3, ascending, +-448 the largest; 0 once."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return tuple(torch.unique(numbers[numbers.isfinite()]).tolist())


def level_scale(form: CodeFormat, x: Tensor, dim: int, *, products: bool = False) -> Tensor:
    """Scale by which the levels of a format come close to all numbers along dimension `dim`, which stays with size 1.

    Of the codes by several scales those that can be brought closest, and their scale of least squares.

    products: the scale by which these codes keep a vector's product with itself instead. That of least squares shortens
        all products with a query by as much as codes miss; coding anew by the longer scale takes half of that back.
    """
    from kvsieve.kernels.cpu import codes as compiled

    assert form.levels is not None
    levels = level_tensor(form.levels, x.device)
    last = dim % x.dim() == x.dim() - 1
    if last and compiled.takes(x, len(levels)) and torch.equal(levels, -levels.flip(0)):
        return compiled.fit_levels(x.contiguous(), levels, _STARTS, products=products)
    squares = x.square().sum(dim, keepdim=True)
    root = (squares / x.shape[dim]).sqrt()
    scale, most = root, torch.full_like(root, -1.0)
    for start in _STARTS:
        near = nearest(form.levels, x / (root * start).clamp_min(torch.finfo(torch.float32).tiny))
        product, norm = (x * near).sum(dim, keepdim=True), near.square().sum(dim, keepdim=True)
        # What these codes take off the squared error.
        gain = product.square() / norm
        found = squares / product.clamp_min(torch.finfo(torch.float32).tiny) if products else product / norm
        scale, most = torch.where(gain > most, found, scale), torch.maximum(gain, most)
    return scale
