"""The random rotation that some codecs turn channels by."""

from __future__ import annotations

import math

from kvsieve.lazy import Tensor, torch

# Kept for good: recorded passes read them where they lie. torch.compile would go past a cached function.
_ROTATIONS: dict[tuple[int, torch.device], Tensor] = {}


def rotation(dim: int, device: torch.device) -> Tensor:
    """A random rotation float32 [dim, dim], the same in every process: signs, then Hadamard's matrix.

    Where `dim` is no power of two, the orthogonal part of a random matrix.
    """
    if (dim, device) not in _ROTATIONS:
        _ROTATIONS[dim, device] = _rotation(dim).to(device)
    return _ROTATIONS[dim, device]


def _rotation(dim: int) -> Tensor:
    random = torch.Generator().manual_seed(dim)
    if dim & (dim - 1):
        made = torch.linalg.qr(torch.randn(dim, dim, generator=random, dtype=torch.float64))[0]
    else:
        made = torch.ones(1, 1, dtype=torch.float64)
        while len(made) < dim:
            made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
        signs = torch.randint(0, 2, (dim, 1), generator=random) * 2 - 1
        made = made * signs / math.sqrt(dim)
    return made.float()
