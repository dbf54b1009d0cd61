"""Linear layers with their weights once more as the CPU's matrix products want them, for passes of few tokens.

A product of one token with a bfloat16 weight as it lies in memory is slower than one with a weight that oneDNN has
packed (benchmarks/decode_profile.py has both). Packed weights take the layers' memory again, from the first token that
is decoded until the plan is detached.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.hf.forward.passes import current
from kvsieve.hf.model.weights import why_not_packed

# Tokens of a pass, of all rows together, up to which the packed weight is the faster one.
_FEW = 64
# A packed weight, where the plain one lay, and how often that had been written to.
_Packed = tuple[Any, int, int]


class PackedLinears:
    """The plain linear layers of a decoder; `install` replaces their forward on the instance, `remove` brings it back.

    Prompts are read before anything is packed, so that their peak of memory is what it is without.

    Args:
        decoder: of a model.
        output: the model's output layer, packed with the decoder's where it is a plain one.

    Attributes:
        seconds: that packing has taken.
        bytes: that the packed weights take now.

    Raises:
        ValueError: there is nothing to pack, or no way to; with the reason.
    """

    def __init__(self, decoder: nn.Module, output: nn.Module | None = None) -> None:
        reason = why_not_packed(decoder)
        if reason is not None:
            raise ValueError(f"packed weights are copies of plain ones, and {reason}")
        layers = [module for module in decoder.modules() if isinstance(module, nn.Linear) and _is_plain(module)]
        kinds = {(module.weight.device.type, module.weight.dtype) for module in layers}
        if kinds != {("cpu", torch.bfloat16)}:
            found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds)) or "none"
            raise ValueError(f"packed weights are for linear layers in bfloat16 on a CPU, found {found}")
        if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
            raise ValueError("this torch has no oneDNN to pack weights with")
        if isinstance(output, nn.Linear) and _is_plain(output) and output not in layers:
            weight = output.weight
            layers += [output] if (weight.device.type, weight.dtype) in kinds else []
        # Whether memory is written to in place is not known of tensors of inference mode.
        self.layers = [module for module in layers if not module.weight.is_inference()]
        self.seconds, self.bytes = 0.0, 0
        self._packed: dict[nn.Linear, _Packed] = {}

    def install(self) -> None:
        """Let the layers multiply with packed weights from the first decoded token on."""
        for module in self.layers:
            module.forward = self._forward_of(module)  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """Bring the layers' own forward back, and free the packed weights."""
        for module in self.layers:
            module.__dict__.pop("forward", None)
        self._packed.clear()
        self.bytes = 0

    def pack(self) -> None:
        """Pack all layers now."""
        began = time.perf_counter()
        for module in self.layers:
            self._pack(module)
        self.seconds += time.perf_counter() - began

    def _pack(self, module: nn.Linear) -> _Packed:
        """Pack a layer's weight, again where it has been written to since."""
        weight = module.weight.detach()
        if module not in self._packed:
            self.bytes += weight.nbytes
        made = torch.ops.mkldnn._reorder_linear_weight(weight, 1), weight.data_ptr(), weight._version
        self._packed[module] = made
        return made

    def _forward_of(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        packed, few = self._packed, _FEW * module.in_features

        # Called hundreds of times per token.
        def forward(given: Tensor) -> Tensor:
            weight, bias = module.weight, module.bias
            if given.numel() > few or _computes_otherwise(given, weight):
                return F.linear(given, weight, bias)
            known = packed.get(module)
            if known is None:
                if packed or not self._begin():
                    return F.linear(given, weight, bias)
                known = packed[module]
            if known[1] != weight.data_ptr() or known[2] != weight._version:
                known = self._pack(module)
            return multiplied(given, known[0], bias)

        return forward

    def _begin(self) -> bool:
        """Pack everything if this pass is the first to decode a token; statistics leave these seconds out."""
        session = current()
        if session is None or session.step.phase != "decode":
            return False
        before = self.seconds
        self.pack()
        session.cache.turn.record.passes.capture_s += self.seconds - before
        return True


def multiplied(given: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
    """Product [..., C] of [..., D] with a packed weight."""
    out: Tensor = _product()(given, packed, bias, "none", [], "")
    return out


@functools.cache
def _product() -> Callable[..., Tensor]:
    return torch.ops.mkldnn._linear_pointwise.default


def _computes_otherwise(given: Tensor, weight: Tensor) -> bool:
    """Tell that gradients or another dtype are wanted, which packed weights do not serve."""
    wants_gradient = torch.is_grad_enabled() and (given.requires_grad or weight.requires_grad)
    return wants_gradient or given.dtype != weight.dtype or torch.is_autocast_enabled("cpu")


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and "forward" not in module.__dict__
