"""Python interface of the C kernel that multiplies a few tokens with the weights of linear layers, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import addressof, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, address_of, function, threaded
from kvsieve.kernels.cpu.decoder_layer import Operand

# Up to this many rows the kernel is faster than torch's products on every kind of CPU.
MOST_ROWS = {torch.float32: 16, torch.bfloat16: 32}
# Codes in products.c of the dtypes of weights and inputs.
_FORMS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.bfloat16, torch.float32): 2,
}


def built() -> Library:
    return threaded("products")


class Weight:
    """References to a linear layer's weight and bias for the kernel; nothing is copied.

    Args:
        weight: [C, D], contiguous, on a CPU, of a dtype of MOST_ROWS.
        bias: [C], of `dtype`, or None.
        dtype: of inputs and products: the weight's own, or float32 with bfloat16 weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        # Keeps their memory alive while it may be read.
        self.weight = weight
        self._bias = bias
        own = weight.dtype
        self.width, inner = weight.shape
        at = 0 if bias is None else bias.data_ptr()
        self._fields = (c_int64 * 5)(weight.data_ptr(), at, self.width, inner, _FORMS[own, dtype or own])
        self.address = addressof(self._fields)


def multiply(given: Tensor, weight: Weight) -> Tensor:
    """Multiply [..., D] with a weight: [..., C].

    given: contiguous, of the weight's input dtype and inner size, with at least one row.
    """
    *before, inner = given.shape
    rows = given.numel() // inner
    out = given.new_empty(*before, weight.width)
    if not _kernel()(weight.address, given.data_ptr(), out.data_ptr(), rows, torch.get_num_threads()):
        raise MemoryError(f"there is no memory for a copy of {rows} rows of {inner} numbers")
    return out


def operand(weight: Weight) -> Operand:
    """Return a weight as decoder_layer.py takes it."""
    return _place(), weight.address, 0, 0, weight.width


@functools.cache
def _place() -> int:
    return address_of(_kernel())


@functools.cache
def _kernel() -> Callable[..., int]:
    return function("products", "multiply", *(c_void_p,) * 3, c_int64, c_int64, returns=c_int64)
