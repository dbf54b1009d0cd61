"""Python interface of the C kernels for all that a decoder layer computes around attention, for few tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import address_of, function

# A linear layer for the kernel: addresses of the function, the weight and its bias; whether it is quantized; its width.
Operand = tuple[int, int, int, int, int]
# Address of a norm's weight, and its epsilon; of none: 0, 0.
Norm = tuple[int, float]
_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
_NORMS = ("before", "after", "queries", "keys")


class _LinearFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("function", "weight", "bias")),
        *((name, c_int64) for name in ("quantized", "width")),
    )


class _LayerFields(Structure):
    """The layer of layers.c."""

    _fields_ = (
        *((name, _LinearFields) for name in _LINEARS),
        *((name, c_void_p) for name in _NORMS),
        *((name, c_int64) for name in ("dim", "head", "half")),
        *((f"eps_{name}", c_float) for name in _NORMS),
    )


class DecoderLayer:
    """Addresses and sizes of a decoder layer's weights; the caller keeps the weights alive.

    Args:
        linears: of queries, keys, values, the output, the gate, what it opens, and the MLP's output.
        norms: before attention and after it, of queries and of keys.
        dim: channels of hidden states.
        head: channels of a head.
        dtype: float32 or bfloat16.

    Attributes:
        address: of the layer of layers.c.
        widths: outputs of each linear layer.
    """

    def __init__(
        self, linears: Sequence[Operand], norms: Sequence[Norm], dim: int, head: int, dtype: torch.dtype
    ) -> None:
        addresses = [address for address, _ in norms]
        sizes = dim, head, dtype == torch.bfloat16
        self._fields = _LayerFields(
            *(_LinearFields(*linear) for linear in linears), *addresses, *sizes, *(eps for _, eps in norms)
        )
        self.address = addressof(self._fields)
        self.dim = dim
        self.head = head
        self.widths = tuple(linear[-1] for linear in linears)

    def before_attention(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, H, L, D] of a layer's input.

        Args:
            x: [B, L, C], contiguous.
            cosine: [B or 1, L, D], contiguous, of the dtype of `x`.
            sine: the same.
        """
        batch, length, _ = x.shape
        rows = batch * length
        wide, narrow, last, *_ = self.widths
        scratch = x.new_empty(rows * (self.dim + max(wide, narrow)))
        query, key, value = (
            x.new_empty(batch, length, width // self.head, self.head) for width in (wide, narrow, last)
        )
        _check(
            _kernels()[0](
                self.address, x.data_ptr(), cosine.data_ptr(), sine.data_ptr(), scratch.data_ptr(), query.data_ptr(),
                key.data_ptr(), value.data_ptr(), rows, cosine.shape[0] * length, torch.get_num_threads(),
            )
        )  # fmt: skip
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def after_attention(self, attended: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output [B, L, C].

        Args:
            attended: [B, L, H, D], what attention returned, contiguous.
            x: [B, L, C], the layer's input, contiguous.
        """
        rows = x.numel() // self.dim
        scratch = x.new_empty(rows * (self.dim + 2 * self.widths[4]))
        out = torch.empty_like(x)
        _check(
            _kernels()[1](
                self.address, attended.data_ptr(), x.data_ptr(), scratch.data_ptr(), out.data_ptr(), rows,
                torch.get_num_threads(),
            )
        )  # fmt: skip
        return out


def _check(done: int) -> None:
    if not done:
        raise MemoryError("there is no memory for a copy of a layer's input")


@functools.cache
def _kernels() -> tuple[Callable[..., int], Callable[..., int]]:
    before = function("layers", "before_attention", *(c_void_p,) * 8, *(c_int64,) * 3, returns=c_int64)
    return before, function("layers", "after_attention", *(c_void_p,) * 5, *(c_int64,) * 2, returns=c_int64)


@functools.cache
def kernel_addresses() -> tuple[int, int]:
    """Return the addresses of the functions before and after attention, for kernels that call them."""
    before, after = _kernels()
    return address_of(before), address_of(after)
