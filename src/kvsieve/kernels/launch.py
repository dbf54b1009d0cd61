"""Helpers of all kernels: sizes of blocks and grids, and the device of a launch."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Programs of a streaming kernel that one multiprocessor runs at a time; they fill an H200 once, without a tail.
PER_SM = 2


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of the GPU's multiprocessors; under the interpreter a few, so that work is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def precision(dtype: torch.dtype) -> str:
    """Return the precision of tl.dot: three TF32 products for float32 inputs, which are not rounded to TF32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def padded(size: int) -> int:
    """Return the power of two, at least 16, that a dimension of tl.dot is padded to."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def fitting(size: int, each: int, most: int) -> int:
    """Return the rows of `each` bytes in a tile of about `size` bytes: a power of two in 16 ... most."""
    return min(most, max(16, 1 << (size // each).bit_length() >> 1))


def cdiv(size: int, by: int) -> int:
    return -(-size // by)


def rows(tensor: Tensor) -> Tensor:
    """Return a tensor with a contiguous last dimension, copied only if needed."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
