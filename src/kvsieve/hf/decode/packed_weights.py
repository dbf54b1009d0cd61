"""Linear layers with their weights once more as the CPU's matrix products want them, for passes of few tokens.

A product of one token with a bfloat16 weight as it lies in memory is slower than one with a weight that oneDNN has
packed (benchmarks/decode_profile.py has both). Packed weights take the layers' memory again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.hf.model.weights import why_not_packed

# Tokens of a pass, of all rows together, up to which the packed weight is the faster one.
_FEW = 64


class PackedLinears:
    """The plain linear layers of a decoder; `install` replaces their forward on the instance, `remove` brings it back.

    Raises ValueError, with the reason, where there is nothing to pack or no way to.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._layers = [
            (name, module)
            for name, module in decoder.named_modules()
            if type(module) is nn.Linear and "forward" not in module.__dict__
        ]
        reason = why_not_packed(decoder)
        if reason is not None:
            raise ValueError(f"packed weights are copies of plain ones, and {reason}")
        kinds = {(module.weight.device.type, module.weight.dtype) for _, module in self._layers}
        if kinds != {("cpu", torch.bfloat16)}:
            found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds)) or "none"
            raise ValueError(f"packed weights are for linear layers in bfloat16 on a CPU, found {found}")
        if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
            raise ValueError("this torch has no oneDNN to pack weights with")

    def install(self) -> None:
        for _, module in self._layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), 1)
            module.forward = functools.partial(_forward, module, packed)  # type: ignore[method-assign]

    def remove(self) -> None:
        for _, module in self._layers:
            module.__dict__.pop("forward", None)


def _forward(module: nn.Linear, packed: Any, given: Tensor) -> Tensor:
    if given.numel() > _FEW * given.shape[-1]:
        return F.linear(given, module.weight, module.bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(given, packed, module.bias, "none", [], "")
    return out
