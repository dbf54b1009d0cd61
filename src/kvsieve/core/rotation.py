"""Random rotation of channels, as some codecs use it, and random sketches of them."""

from __future__ import annotations

import functools
import math

from kvsieve.lazy import Tensor, torch

# Cached forever: recorded passes read them at their address.
_ROTATIONS: dict[tuple[int, torch.device], Tensor] = {}


def rotation(dim: int, device: torch.device) -> Tensor:
    """Return a random rotation float32 [dim, dim], equal in every process: signs, then Hadamard's matrix.

    If `dim` is not a power of two, it is the orthogonal part of a random matrix.
    """
    if (dim, device) not in _ROTATIONS:
        _ROTATIONS[dim, device] = _rotation(dim).to(device)
    return _ROTATIONS[dim, device]


def _rotation(dim: int) -> Tensor:
    random = torch.Generator().manual_seed(dim)
    if dim & (dim - 1):
        matrix = torch.linalg.qr(torch.randn(dim, dim, generator=random, dtype=torch.float64))[0]
    else:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < dim:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        signs = torch.randint(0, 2, (dim, 1), generator=random) * 2 - 1
        matrix = matrix * signs / math.sqrt(dim)
    return matrix.float()


@functools.lru_cache(maxsize=32)
def sketch(dim: int, width: int, device: torch.device) -> Tensor:
    """Return a random map float32 [dim, width] with entries of variance 1 / width, equal in every process."""
    random = torch.Generator().manual_seed(dim * 65536 + width)
    return (torch.randn(dim, width, generator=random) / math.sqrt(width)).to(device)
