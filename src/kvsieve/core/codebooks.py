"""Codebooks: the levels of codes, and the scales that suit them."""

from __future__ import annotations

import functools
import itertools
import math

from kvsieve.core.codes import CodeFormat, level_tensor, nearest
from kvsieve.lazy import Tensor, torch

# Rounds of Lloyd's iteration: 16 levels then move by less than 1e-12.
_ROUNDS = 2000
# Scales to try, over the root mean square: one alone may lead to codes that are only second best. Over 64 channels the
# squared error is at most 1, 2 and 5% (2, 3 and 4 bits) above that of the best of 60.
_STARTS = (0.8, 0.9, 1.0, 1.1, 1.2)


@functools.cache
def gaussian_levels(bits: int) -> tuple[float, ...]:
    """Return the `bits`-bit levels with the least mean squared error on the standard normal distribution (Lloyd, Max).

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
    """Return the mean of the standard normal distribution between two numbers, 0 <= low < high."""
    density = math.exp(-low * low / 2) - math.exp(-high * high / 2)
    mass = math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))
    return density / mass * math.sqrt(2 / math.pi)


@functools.cache
def float8_levels() -> tuple[float, ...]:
    """Return the numbers of the 8-bit float e4m3, ascending, from -448 to 448, with one 0."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return tuple(torch.unique(numbers[numbers.isfinite()]).tolist())


def level_scale(form: CodeFormat, x: Tensor, dim: int, *, products: bool = False) -> Tensor:
    """Return the scale at which a format's levels fit the numbers along `dim` best; `dim` keeps size 1.

    Codes are made at several scales; the best of them determine the scale of least squares.

    products: return the scale at which these codes preserve a vector's product with itself instead. The least-squares
    scale shortens products with a query by the coding error; recoding at the longer scale recovers half of that.
    """
    from kvsieve.kernels.cpu import codes as compiled

    assert form.levels is not None
    levels = level_tensor(form.levels, x.device)
    last = dim % x.dim() == x.dim() - 1
    if last and compiled.takes(x, len(levels)) and torch.equal(levels, -levels.flip(0)):
        return compiled.fit_levels(x.contiguous(), levels, _STARTS, products=products)
    squares = x.square().sum(dim, keepdim=True)
    root = (squares / x.shape[dim]).sqrt()
    scale = root
    most = torch.full_like(root, -1.0)
    for start in _STARTS:
        near = nearest(form.levels, x / (root * start).clamp_min(torch.finfo(torch.float32).tiny))
        product = (x * near).sum(dim, keepdim=True)
        norm = near.square().sum(dim, keepdim=True)
        # Squared error that these codes remove.
        gain = product.square() / norm
        found = squares / product.clamp_min(torch.finfo(torch.float32).tiny) if products else product / norm
        scale = torch.where(gain > most, found, scale)
        most = torch.maximum(gain, most)
    return scale
