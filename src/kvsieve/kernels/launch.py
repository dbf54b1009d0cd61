"""Helpers of all kernels: sizes of blocks and grids, and the device that a launch goes to."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Programs of a streaming kernel that one multiprocessor runs at a time; so many fill an H200 once, without a tail.
PER_SM = 2


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of the GPU's multiprocessors; under the interpreter a few, so that work is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def precision(dtype: torch.dtype) -> str:
    """Precision of tl.dot: float32 inputs are multiplied in three TF32 products, not rounded to TF32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def padded(size: int) -> int:
    """Power of two, at least 16, that a dimension of tl.dot is padded to."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """Least power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def fitting(size: int, each: int, most: int) -> int:
    """Rows of `each` bytes in a tile of about `size` bytes: a power of two in 16 ... most."""
    return min(most, max(16, 1 << (size // each).bit_length() >> 1))


def cdiv(size: int, by: int) -> int:
    """Quotient, rounded up."""
    return -(-size // by)


def rows(tensor: Tensor) -> Tensor:
    """Tensor with a contiguous last dimension, as kernels read it; a copy only where that is not so already."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
