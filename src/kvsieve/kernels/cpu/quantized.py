"""Weights as GGUF files store them, and their products.

A row of a weight is a sequence of blocks: integers of a few bits and the scales that they share. Products of few tokens
read the blocks as they are; for many tokens the weight is dequantized into a buffer first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import addressof, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, address_of, function, library
from kvsieve.kernels.cpu.decoder_layer import Operand

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
# Types that are numbers of torch.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Dtypes of numbers that the kernel reads and writes, and whether they are bfloat16.
_HALF = {torch.float32: 0, torch.bfloat16: 1}


def built() -> Library:
    return library("quantized")


class QuantizedMatrix:
    """A weight [C, D] in blocks; nothing is copied.

    Args:
        data: uint8 [C, bytes of a row], contiguous, on a CPU; may be memory-mapped.
        kind: name of its format, of FORMATS.
        order: int64 [C], row of `data` that is row i of the weight; None: as stored.

    Attributes:
        width: C.
        inner: D.
        address: of its description for the kernel.

    Raises:
        ValueError: the bytes of a row are no whole number of blocks, or `order` is no permutation.
    """

    def __init__(self, data: Tensor, kind: str, order: Tensor | None = None) -> None:
        self.format = FORMATS[kind]
        blocks, rest = divmod(data.shape[1], self.format.nbytes)
        if rest:
            raise ValueError(f"a row of {data.shape[1]} bytes is no whole number of {kind} blocks")
        if data.dtype != torch.uint8 or data.device.type != "cpu" or not data.is_contiguous():
            raise ValueError(f"blocks are contiguous bytes on a CPU, got {data.dtype} on {data.device}")
        self.data = data
        self.kind = kind
        self.order = None if order is None else order.contiguous()
        self.width = len(data)
        self.inner = blocks * self.format.size
        if order is not None and not _is_permutation(order, self.width):
            raise ValueError(f"an order of {self.width} rows names each once, got {len(order)} rows: {order}")
        at = 0 if self.order is None else self.order.data_ptr()
        self._fields = (c_int64 * 6)(data.data_ptr(), at, self.width, self.inner, self.format.number, data.shape[1])
        self.address = addressof(self._fields)

    @classmethod
    def of(cls, weight: Tensor) -> QuantizedMatrix:
        """Return a matrix over a contiguous weight [C, D] on a CPU, of a dtype of PLAIN."""
        kind = next(kind for kind, dtype in PLAIN.items() if dtype == weight.dtype)
        return cls(weight.detach().view(torch.uint8), kind)

    def __reduce__(self) -> tuple[Any, ...]:
        # A view of a file would be pickled with all of the file.
        return QuantizedMatrix, (self.data.clone(), self.kind, self.order)

    def __deepcopy__(self, memo: object) -> QuantizedMatrix:
        """Return itself, because blocks are never written."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes

    @property
    def numbers(self) -> Tensor | None:
        """The weight [C, D] itself, which must not be written to; None where it is in blocks, or its rows moved."""
        return self.data.view(PLAIN[self.kind]) if self.kind in PLAIN and self.order is None else None

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dequantized rows [N, D] of the weight. index: int64 [N], of its rows."""
        if dtype in _HALF and built().loaded is not None:
            return self._write(index.contiguous(), torch.empty(len(index), self.inner, dtype=dtype))
        at = index if self.order is None else self.order[index]
        return _dequantized(self.data[at], self.kind).to(dtype)

    def dequantize(self, out: Tensor) -> Tensor:
        """Write all rows into `out` [C, D], float32 or bfloat16, contiguous, and return it."""
        if out.dtype in _HALF and built().loaded is not None:
            return self._write(None, out)
        return out.copy_(self.rows(torch.arange(self.width), out.dtype))

    def _write(self, index: Tensor | None, out: Tensor) -> Tensor:
        at = None if index is None else index.data_ptr()
        half, threads = _HALF[out.dtype], torch.get_num_threads()
        wrong = _dequantize()(self.address, at, len(out), out.data_ptr(), half, threads)
        if wrong:
            assert index is not None
            raise IndexError(f"row {int(index[wrong - 1])} of a weight of {self.width} rows")
        return out


def multiply(given: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Multiply [..., D], of at most MOST_ROWS tokens, with a weight: [..., C].

    Numbers of the weight are exact, sums are float32.

    Args:
        given: float32 or bfloat16, contiguous.
        matrix: the weight.
        bias: [C], of the dtype of `given`, or None.
    """
    if given.dtype not in _HALF or built().loaded is None:
        weight = matrix.rows(torch.arange(matrix.width), torch.float32)
        return F.linear(given.float(), weight, None if bias is None else bias.float()).to(given.dtype)
    *before, inner = given.shape
    rows = given.numel() // inner
    out = given.new_empty(*before, matrix.width)
    at = None if bias is None else bias.data_ptr()
    half, threads = _HALF[given.dtype], torch.get_num_threads()
    if not _multiply()(matrix.address, at, given.data_ptr(), out.data_ptr(), rows, half, threads):
        raise MemoryError(f"there is no memory for a copy of {rows} rows of {inner} numbers")
    return out


def operand(matrix: QuantizedMatrix, bias: Tensor | None) -> Operand:
    """Return a weight and its bias as decoder_layer.py takes them."""
    return _place(), matrix.address, 0 if bias is None else bias.data_ptr(), 1, matrix.width


@functools.cache
def _place() -> int:
    return address_of(_multiply())


def _is_permutation(order: Tensor, width: int) -> bool:
    return order.dtype == torch.int64 and torch.equal(order.sort().values, torch.arange(width))


@functools.cache
def _multiply() -> Callable[..., int]:
    return function("quantized", "multiply", *(c_void_p,) * 4, *(c_int64,) * 3, returns=c_int64)


@functools.cache
def _dequantize() -> Callable[..., int]:
    return function("quantized", "dequantize", c_void_p, c_void_p, c_int64, c_void_p, *(c_int64,) * 2, returns=c_int64)


def _dequantized(data: Tensor, kind: str) -> Tensor:
    if kind in PLAIN:
        return data.view(PLAIN[kind])
    import gguf

    return torch.from_numpy(gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))
