"""Calling the C kernel for products of a few tokens with the weights of linear layers, as these lie in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, library

# Rows up to which torch's own products, which compute more of them at once, are not as fast on any kind of CPU.
MOST_ROWS = {torch.float32: 16, torch.bfloat16: 32}
# What products.c calls the dtypes of weights and of what they are multiplied with.
_FORMS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.bfloat16, torch.float32): 2,
}


def built() -> Library:
    """Return the kernel's library, compiled now if it never was; see build.library."""
    return library("products")


class Weights:
    """Weights and biases of layers of one input, as the kernel finds them: references, no copies.

    Args:
        weights: [C, D] each, contiguous, on a CPU, of one dtype of MOST_ROWS.
        biases: [C] each, of `dtype`, or None.
        dtype: of what is multiplied with them, and of the products: the weights' own, or float32 beside bfloat16.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dtype: torch.dtype | None = None
    ) -> None:
        # Their memory is not freed while it may be read.
        self._held = *weights, *biases
        self.widths = [weight.shape[0] for weight in weights]
        own = weights[0].dtype
        fields = [len(weights), weights[0].shape[1], _FORMS[own, dtype or own]]
        for weight, bias in zip(weights, biases, strict=True):
            fields += [weight.data_ptr(), 0 if bias is None else bias.data_ptr(), weight.shape[0]]
        self._fields = (c_int64 * len(fields))(*fields)
        self.address = addressof(self._fields)
        self.width = sum(self.widths)


def multiply(given: Tensor, weights: Weights) -> tuple[Tensor, ...]:
    """Products [..., C] of [..., D] with each weight, contiguous ones.

    given: contiguous, of the dtype that the weights were told to go with and their inner size, with at least one row.
    """
    shape = given.shape
    rows = given.numel() // shape[-1]
    parts: tuple[Tensor, ...]
    out = given.new_empty(rows * weights.width)
    if len(weights.widths) == 1:
        parts = (out.view(*shape[:-1], weights.width),)
    else:
        flat = out.split_with_sizes([rows * width for width in weights.widths])
        parts = tuple(part.view(*shape[:-1], width) for part, width in zip(flat, weights.widths, strict=True))
    if not _kernel()(weights.address, given.data_ptr(), out.data_ptr(), rows, torch.get_num_threads()):
        raise MemoryError(f"there is no memory for a copy of {rows} rows of {shape[-1]} numbers")
    return parts


@functools.cache
def _kernel() -> Callable[..., int]:
    loaded = built().loaded
    assert loaded is not None
    found = loaded.multiply
    found.argtypes, found.restype = (c_void_p, c_void_p, c_void_p, c_int64, c_int64), c_int64
    return found


__all__ = ["MOST_ROWS", "Weights", "built", "multiply"]
