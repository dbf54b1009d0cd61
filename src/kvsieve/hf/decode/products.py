"""The product of few tokens with a linear layer's weight, read in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.hf.decode.narrow import NarrowWeight
from kvsieve.kernels.cpu import products as kernel

# A layer's weight and bias, and their addresses.
_Place = tuple[Tensor, int, Tensor | None, int]


class Product:
    """Multiplies with the weight of one linear layer, read in place.

    Args:
        layer: source of weight and bias.
        narrow: read a float32 weight from a bfloat16 copy if that has the same numbers; see `NarrowWeight`.
    """

    def __init__(self, layer: nn.Linear, narrow: bool = False) -> None:
        self._held: Mapping[str, Any] = layer._parameters
        self.narrow = NarrowWeight() if narrow and layer.weight.dtype == torch.float32 else None
        # Their last address, and the kernel's description of them; None if it cannot read them.
        self._known: tuple[_Place | None, kernel.Weight | None] = None, None

    @property
    def is_settled(self) -> bool:
        """True once no copy of the weight is to come."""
        return self.narrow is None or self.narrow.is_decided

    def free(self) -> None:
        """Release all tensors."""
        self._known = None, None
        if self.narrow is not None:
            self.narrow.free()

    def look(self) -> None:
        """Free a copy of a weight that was written in a way that torch does not count."""
        place, _ = self._known
        if place is not None and self.narrow is not None and _lies_so(place, self._held):
            self.narrow.look(place[0])

    def of(self, given: Tensor) -> Tensor | None:
        """Return the product [..., C] of [..., D], or None if the kernel cannot read the weight in place."""
        weight = self.ready(given.dtype)
        return None if weight is None else kernel.multiply(given.contiguous(), weight)

    def ready(self, dtype: torch.dtype) -> kernel.Weight | None:
        """Return the weight for a product with inputs of `dtype`, or None if the kernel cannot read it in place."""
        place, weight = self._known
        if place is None or not _lies_so(place, self._held):
            self.free()
            self._known = place, weight = _found(self._held)
        if place is None or weight is None or dtype != place[0].dtype:
            return None
        return weight if self.narrow is None else self.narrow.copy_of(place[0], place[2]) or weight


def is_readable(weight: Any, bias: Any) -> bool:
    """Return True if the kernel reads a layer's weight and bias in place."""
    if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return False
    if not weight.is_cpu or weight.dtype not in kernel.MOST_ROWS or not weight.is_contiguous():
        return False
    return bias is None or (bias.is_cpu and bias.dtype == weight.dtype and bias.is_contiguous())


def _found(held: Mapping[str, Any]) -> tuple[_Place | None, kernel.Weight | None]:
    weight = held["weight"]
    bias = held["bias"]
    if not is_readable(weight, bias):
        return None, None
    with torch.no_grad():
        return (weight, weight.data_ptr(), bias, 0 if bias is None else bias.data_ptr()), kernel.Weight(weight, bias)


def _lies_so(place: _Place, held: Mapping[str, Any]) -> bool:
    """Return True if weight and bias are the same objects in the same memory."""
    weight, at, bias, bias_at = place
    if held["weight"] is not weight or weight.data_ptr() != at or not weight.is_contiguous():
        return False
    return held["bias"] is bias and (bias is None or bias.data_ptr() == bias_at)
