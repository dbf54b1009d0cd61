"""Calling the C kernels of codebooks: scales of vectors, and their codes, each alone or all of a vector together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, function, library

# Levels that the kernels have a form for.
_LEVELS = (4, 8, 16)

# Numbers of a vector that `shape_codes` takes.
_MOST = 1024


class _Fields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "levels", "starts", "borders", "metric", "rows", "scale", "codes")),
        *((name, c_int64) for name in ("vectors", "size", "half", "begins", "products", "each", "rounds")),
    )


def built() -> Library:
    """Return the kernels' library, compiled now if it never was; see build.library."""
    return library("codes")


def takes(x: Tensor, levels: int) -> bool:
    """Tell whether the kernels take numbers, and so many levels."""
    here = x.device.type == "cpu" and x.dtype == torch.float32 and levels in _LEVELS
    return here and built().reason is None


def fit_levels(x: Tensor, levels: Tensor, starts: Sequence[float], *, products: bool) -> Tensor:
    """Return the scale of each vector by which levels come close to its numbers, as `core.codebooks.level_scale` does.

    Args:
        x: float32 [..., size], contiguous.
        levels: float32 [L], ascending, symmetric about 0; L is one of 4, 8, 16.
        starts: scales to start from, over the vector's root mean square.
        products: keep the vector's product with itself, in place of least squares.

    Returns:
        float32 [..., 1]; NaN or infinite where a vector is.
    """
    made = torch.empty(*x.shape[:-1], 1)
    positive, given = levels[len(levels) // 2 :].contiguous(), torch.tensor(starts)
    job = _Fields(vectors=made.numel(), size=x.shape[-1], half=len(positive), begins=len(given))
    job.products = products
    job.x, job.levels, job.starts, job.scale = x.data_ptr(), positive.data_ptr(), given.data_ptr(), made.data_ptr()
    _kernels()[0](byref(job), torch.get_num_threads())
    return made


def code_levels(x: Tensor, borders: Tensor) -> Tensor:
    """Return the codes uint8 of the levels nearest to numbers, as many as borders are below each.

    Args:
        x: float32 [..., size], contiguous.
        borders: float32 [L - 1], between each level and the next; L is one of 4, 8, 16.
    """
    made = torch.empty(x.shape, dtype=torch.uint8)
    job = _Fields(vectors=x.numel() // max(x.shape[-1], 1), size=x.shape[-1], half=(len(borders) + 1) // 2)
    job.x, job.borders, job.codes = x.data_ptr(), borders.data_ptr(), made.data_ptr()
    _kernels()[1](byref(job), torch.get_num_threads())
    return made


def shapes(x: Tensor, levels: int) -> bool:
    """Tell whether `shape_codes` takes vectors."""
    return takes(x, levels) and x.shape[-1] <= _MOST


def shape_codes(x: Tensor, metric: Tensor, rows: Tensor, levels: Tensor, codes: Tensor, rounds: int) -> Tensor:
    """Choose codes anew, in place, as `core.shaping.encode_shaped` does; return the scales, float32 [N, T, 1].

    Args:
        x: float32 [N, T, D], contiguous.
        metric: float32 [R, D, D], contiguous, symmetric.
        rows: int64 [N], contiguous: which metric is each block's.
        levels: float32 [L], ascending, symmetric about 0; L is one of 4, 8, 16.
        codes: uint8 [N, T, D], contiguous.
        rounds: times that each code is chosen.
    """
    made, positive = torch.empty(*x.shape[:-1], 1), levels[len(levels) // 2 :].contiguous()
    job = _Fields(vectors=made.numel(), size=x.shape[-1], half=len(positive), each=x.shape[1], rounds=rounds)
    job.x, job.metric, job.rows, job.levels = x.data_ptr(), metric.data_ptr(), rows.data_ptr(), positive.data_ptr()
    job.scale, job.codes = made.data_ptr(), codes.data_ptr()
    _kernels()[2](byref(job), torch.get_num_threads())
    return made


@functools.cache
def _kernels() -> tuple[Callable[..., None], ...]:
    """Return what fits scales, what codes by them, and what chooses codes together."""
    return tuple(function("codes", symbol) for symbol in ("fit_levels", "code_levels", "shape_codes"))
