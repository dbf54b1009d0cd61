"""Python interface of the C kernels for the small operations of a decoder layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, function, library

DTYPES = (torch.float32, torch.bfloat16)


def built() -> Library:
    return library("layers")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide [..., D] by its root mean square and multiply by weights [D]. x: contiguous, of one of DTYPES."""
    out = torch.empty_like(x)
    dim = x.shape[-1]
    _kernels()[0](
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, eps, x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the two halves of each head by a token's angles.

    Args:
        x: [B, H, L, D], of one of DTYPES; a token's heads are adjacent in memory.
        cosine: [B or 1, L, D], contiguous.
        sine: the same.

    Returns:
        [B, H, L, D], in the memory layout of `x`.
    """
    out = torch.empty_like(x)
    batch, heads, length, dim = x.shape
    _kernels()[1](
        x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), out.data_ptr(), batch * length, heads, dim,
        cosine.shape[0] * length, x.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. Both: contiguous, of one shape and one of DTYPES."""
    out = torch.empty_like(gate)
    _kernels()[2](
        gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), gate.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


@functools.cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    norm = function("layers", "rms_norm", *(c_void_p,) * 3, c_int64, c_int64, c_float, c_int64, c_int64)
    turn = function("layers", "rotate", *(c_void_p,) * 4, *(c_int64,) * 6)
    return norm, turn, function("layers", "gated_silu", *(c_void_p,) * 3, *(c_int64,) * 3)
