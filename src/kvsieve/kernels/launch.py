"""What all kernels share: sizes of blocks and grids, and the device that a launch goes to."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Programs of a streaming kernel that one multiprocessor runs at a time; so many fill an H200 once, without a tail.
PER_SM = 2


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; under the interpreter a few, so that work is split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies: float32 inputs are taken apart in three, not rounded to TF32, and stay on tensor cores."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def padded(size: int) -> int:
    """The power of two, at least 16, that a dimension of tl.dot is padded to."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """The least one that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def fitting(size: int, each: int, most: int) -> int:
    """How many rows of `each` bytes a tile of about `size` bytes has: a power of two in 16 ... most."""
    return min(most, max(16, 1 << (size // each).bit_length() >> 1))


def cdiv(size: int, by: int) -> int:
    return -(-size // by)


def rows(tensor: Tensor) -> Tensor:
    """The same with its last dimension contiguous, as kernels read it: a copy only where that is not so already."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
