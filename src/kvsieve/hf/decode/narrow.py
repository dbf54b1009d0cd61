"""Bfloat16 copies of float32 weights with bfloat16 numbers: half of the bytes per token, and the same numbers.

Checkpoints in bfloat16 become float32 on processors without instructions for bfloat16. A token's products are bound by
reading weights, so copies in bfloat16 halve their time. Nothing is rounded: a weight with any other number is not
copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from kvsieve.kernels.cpu import products as kernel
from kvsieve.report.display import mebibytes

# Products from which on a copy pays: making it takes the time of two or three.
_AFTER = 4
# Copies may take this part of the memory that is free.
_PART = 4


class NarrowWeight:
    """Copy in bfloat16 of a weight, made once it has been multiplied with a few times.

    Attributes:
        copy: as the kernel reads it; None for none.
        nbytes: bytes of the copy.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._used = 0
        self.copy: kernel.Weight | None = None
        self._sample: Tensor | None = None
        self.nbytes = 0

    def copy_of(self, weight: Tensor, bias: Tensor | None) -> kernel.Weight | None:
        """Return the bf16 copy used by the kernel, or None if copying would not pay off or is not allowed.

        A weight that was written to since is copied again; of writes through ``.data``, which torch does not count, see
        `look`.
        """
        version = weight._version
        if version != self._version:
            self.free()
            self._version = version
        self._used += 1
        if self._used == _AFTER:
            copy = narrowed(weight.detach())
            if copy is not None:
                self.copy = kernel.Weight(copy, bias, torch.float32)
                self.nbytes = copy.nbytes
                self._sample = _sample(weight)
        return self.copy

    @property
    def is_decided(self) -> bool:
        """True once the weight has been multiplied with so often that there is a copy, if there will be one."""
        return self._used >= _AFTER

    def look(self, weight: Tensor) -> None:
        """Free the copy if a sample of each row and each column of the weight has changed."""
        if self._sample is not None and not torch.equal(self._sample, _sample(weight)):
            self.free()

    def free(self) -> None:
        """Free the copy."""
        self._version = None
        self._used = 0
        self.copy = None
        self._sample = None
        self.nbytes = 0


def _sample(weight: Tensor) -> Tensor:
    """Copy a number of every row and of every column of a weight [C, D]."""
    at = torch.arange(max(weight.shape))
    return weight.detach()[at % weight.shape[0], at % weight.shape[1]]


def narrowed(weight: Tensor) -> Tensor | None:
    """Return a bfloat16 copy of a contiguous float32 weight, or None if that would round a number.

    Halves of numbers are compared and copied as integers, with the lower first on these processors: converting back and
    forth takes several times as long.
    """
    halves = weight.view(torch.int16).view(*weight.shape, 2)
    if torch.count_nonzero(halves[..., 0]):
        return None
    return halves[..., 1].contiguous().view(torch.bfloat16)


def why_not_narrow(layers: Iterable[nn.Linear]) -> str | None:
    """Return the reason why these layers' weights have no copies in bfloat16, or None."""
    wide = [layer.weight for layer in layers if layer.weight.dtype == torch.float32]
    if not wide:
        return "no weight is float32"
    if any(weight.is_inference() for weight in wide):
        return "whether memory is written to is not known of tensors of inference mode"
    size = sum(weight.nbytes for weight in wide) // 2
    free = free_memory()
    if free is None or size * _PART > free:
        room = "an unknown number of bytes" if free is None else mebibytes(free)
        return f"copies in bfloat16 would take {mebibytes(size)} of {room} free"
    return None


def free_memory() -> int | None:
    """Bytes that this process may still allocate: of the machine, or of its control group; None where unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(max(int(limit) - int(used), 0))
    return min(found, default=None)
