"""Weights as GGUF files store them, and their products.

A row of a weight is a sequence of blocks: integers of a few bits and the scales that they share. Products of few tokens
read the blocks as they are; for many tokens the weight is dequantized into a buffer first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this many tokens, products read the blocks.
MOST_ROWS = 32


class Format(NamedTuple):
    """Layout of the numbers of a GGUF type. number: of the type; size: numbers per block; nbytes: bytes per block."""

    number: int
    size: int
    nbytes: int


# The types that are computed with as they are stored; by the names of the package gguf.
FORMATS = {
    "F32": Format(0, 1, 4),
    "F16": Format(1, 1, 2),
    "Q4_0": Format(2, 32, 18),
    "Q4_1": Format(3, 32, 20),
    "Q5_0": Format(6, 32, 22),
    "Q5_1": Format(7, 32, 24),
    "Q8_0": Format(8, 32, 34),
    "Q2_K": Format(10, 256, 84),
    "Q3_K": Format(11, 256, 110),
    "Q4_K": Format(12, 256, 144),
    "Q5_K": Format(13, 256, 176),
    "Q6_K": Format(14, 256, 210),
    "BF16": Format(30, 1, 2),
}


class QuantizedMatrix:
    """A weight [C, D] in blocks; nothing is copied.

    Args:
        data: uint8 [C, bytes of a row], contiguous, on a CPU; may be memory-mapped.
        kind: name of its format, of FORMATS.
        order: int64 [C], row of `data` that is row i of the weight; None: as stored.

    Attributes:
        width: C.
        inner: D.

    Raises:
        ValueError: the bytes of a row are no whole number of blocks.
    """

    def __init__(self, data: Tensor, kind: str, order: Tensor | None = None) -> None:
        self.format = FORMATS[kind]
        blocks, rest = divmod(data.shape[1], self.format.nbytes)
        if rest:
            raise ValueError(f"a row of {data.shape[1]} bytes is no whole number of {kind} blocks")
        self.data = data
        self.kind = kind
        self.order = order
        self.width = len(data)
        self.inner = blocks * self.format.size

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dequantized rows [N, D] of the weight. index: int64 [N], of its rows."""
        at = index if self.order is None else self.order[index]
        return _dequantized(self.data[at], self.kind).to(dtype)

    def dequantize(self, out: Tensor) -> Tensor:
        """Write all rows into `out` [C, D], float32 or bfloat16, contiguous, and return it."""
        return out.copy_(self.rows(torch.arange(self.width), out.dtype))


def multiply(given: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Multiply [..., D], of at most MOST_ROWS tokens, with a weight: [..., C].

    Numbers of the weight are exact, sums are float32.

    Args:
        given: float32 or bfloat16, contiguous.
        matrix: the weight.
        bias: [C], of the dtype of `given`, or None.
    """
    weight = matrix.rows(torch.arange(matrix.width), torch.float32)
    product = F.linear(given.float(), weight, None if bias is None else bias.float())
    return product.to(given.dtype)


def _dequantized(data: Tensor, kind: str) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))


__all__ = ["FORMATS", "MOST_ROWS", "Format", "QuantizedMatrix", "multiply"]
