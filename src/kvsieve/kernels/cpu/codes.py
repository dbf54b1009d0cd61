"""Python interface of the C kernels of codebooks: scales and codes of vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, function, library

# Numbers of levels that the kernels support.
_LEVELS = (4, 8, 16)

# Numbers of a vector that `shape_codes` takes.
_MOST = 1024


class _Fields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "levels", "starts", "borders", "metric", "rows", "scale", "codes")),
        *((name, c_int64) for name in ("vectors", "size", "half", "begins", "products", "each", "rounds")),
    )


def built() -> Library:
    return library("codes")


def takes(x: Tensor, levels: int) -> bool:
    """Return whether the kernels support these numbers, and this many levels."""
    here = x.device.type == "cpu" and x.dtype == torch.float32 and levels in _LEVELS
    return here and built().reason is None


def fit_levels(x: Tensor, levels: Tensor, starts: Sequence[float], *, products: bool) -> Tensor:
    """Return the scale of each vector at which levels fit its numbers best, as `core.codebooks.level_scale` does.

    Args:
        x: float32 [..., size], contiguous.
        levels: float32 [L], ascending, symmetric about 0; L is one of 4, 8, 16.
        starts: scales to start from, over the vector's root mean square.
        products: preserve the vector's product with itself, instead of least squares.

    Returns:
        float32 [..., 1]; NaN or infinite where a vector is.
    """
    scale = torch.empty(*x.shape[:-1], 1)
    positive = levels[len(levels) // 2 :].contiguous()
    factors = torch.tensor(starts)
    job = _Fields(vectors=scale.numel(), size=x.shape[-1], half=len(positive), begins=len(factors))
    job.products = products
    job.x, job.levels, job.starts, job.scale = x.data_ptr(), positive.data_ptr(), factors.data_ptr(), scale.data_ptr()
    _kernels()[0](byref(job), torch.get_num_threads())
    return scale


def code_levels(x: Tensor, borders: Tensor) -> Tensor:
    """Return the codes uint8 of the levels nearest to numbers: the count of borders below each.

    Args:
        x: float32 [..., size], contiguous.
        borders: float32 [L - 1], midpoints of adjacent levels; L is one of 4, 8, 16.
    """
    codes = torch.empty(x.shape, dtype=torch.uint8)
    job = _Fields(vectors=x.numel() // max(x.shape[-1], 1), size=x.shape[-1], half=(len(borders) + 1) // 2)
    job.x, job.borders, job.codes = x.data_ptr(), borders.data_ptr(), codes.data_ptr()
    _kernels()[1](byref(job), torch.get_num_threads())
    return codes


def shapes(x: Tensor, levels: int) -> bool:
    return takes(x, levels) and x.shape[-1] <= _MOST


def shape_codes(x: Tensor, metric: Tensor, rows: Tensor, levels: Tensor, codes: Tensor, rounds: int) -> Tensor:
    """Adjust codes in place, as `core.shaping.encode_shaped` does; return the scales, float32 [N, T, 1].

    Args:
        x: float32 [N, T, D], contiguous.
        metric: float32 [R, D, D], contiguous, symmetric.
        rows: int64 [N], contiguous: index of each block's metric.
        levels: float32 [L], ascending, symmetric about 0; L is one of 4, 8, 16.
        codes: uint8 [N, T, D], contiguous.
        rounds: times that each code is chosen.
    """
    scale = torch.empty(*x.shape[:-1], 1)
    positive = levels[len(levels) // 2 :].contiguous()
    job = _Fields(vectors=scale.numel(), size=x.shape[-1], half=len(positive), each=x.shape[1], rounds=rounds)
    job.x, job.metric, job.rows, job.levels = x.data_ptr(), metric.data_ptr(), rows.data_ptr(), positive.data_ptr()
    job.scale, job.codes = scale.data_ptr(), codes.data_ptr()
    _kernels()[2](byref(job), torch.get_num_threads())
    return scale


@functools.cache
def _kernels() -> tuple[Callable[..., None], ...]:
    """Return the functions that fit scales, encode, and choose codes jointly."""
    return tuple(function("codes", symbol) for symbol in ("fit_levels", "code_levels", "shape_codes"))
