"""Linear layers with their weights once more as the CPU's matrix products want them, for passes of few tokens.

A product of one token with a bfloat16 weight as it lies in memory is slower than one with a weight that oneDNN has
packed (benchmarks/decode_profile.py has both). Packed weights take the layers' memory again, from the first token that
is decoded until the plan is detached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.hf.decode.products import Product, together
from kvsieve.hf.forward.passes import current
from kvsieve.hf.model.weights import why_not_packed

# Tokens of a pass, of all rows together, up to which the packed weight is the faster one.
_FEW = 64


class PackedLinears:
    """The plain linear layers of a decoder; `install` replaces their forward on the instance, `remove` brings it back.

    Prompts are read before anything is packed, so that their peak of memory is what it is without.

    Args:
        decoder: of a model.
        output: the model's output layer, packed with the decoder's where it is a plain one.
        joint: layers that read the same input are one product; see `together`.

    Attributes:
        layers: that are packed.
        products: of which several layers may be one.
        seconds: that packing has taken.

    Raises:
        ValueError: there is nothing to pack, or no way to; with the reason.
    """

    def __init__(self, decoder: nn.Module, output: nn.Module | None = None, *, joint: bool = True) -> None:
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
        self.products = [Product(each) for each in (together(decoder, self.layers) if joint else ())]
        among = {layer for product in self.products for layer in product.layers}
        self.products += [Product([layer]) for layer in self.layers if layer not in among]
        self.seconds = 0.0
        # Several threads may generate at once.
        self._dividing = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes that the packed weights take now."""
        return sum(product.nbytes for product in self.products)

    def install(self) -> None:
        """Let the layers multiply with packed weights from the first decoded token on."""
        for product in self.products:
            self._install(product)

    def remove(self) -> None:
        """Bring the layers' own forward back, and free the packed weights."""
        for module in self.layers:
            module.__dict__.pop("forward", None)
        for product in self.products:
            product.free()

    def pack(self) -> None:
        """Pack all layers now."""
        began = time.perf_counter()
        for product in self.products:
            product.pack()
        self.seconds += time.perf_counter() - began

    def _install(self, product: Product) -> None:
        for at, layer in enumerate(product.layers):
            one = self._alone(product) if len(product.layers) == 1 else self._among(product, at)
            layer.forward = one  # type: ignore[assignment, method-assign]

    def _alone(self, product: Product) -> Callable[[Tensor], Tensor]:
        parameters: Any = product.layers[0]._parameters
        few = _FEW * product.layers[0].in_features

        # Called hundreds of times per token, as is the next one.
        def forward(given: Tensor) -> Tensor:
            weight = parameters["weight"]
            if given.numel() <= few and not _computes_otherwise(given, weight) and self._is_ready(product):
                return product.of(given)
            return F.linear(given, weight, parameters["bias"])

        return forward

    def _among(self, product: Product, at: int) -> Callable[[Tensor], Tensor]:
        """Return the forward of one of several layers: the first multiplies for all, the others take their parts."""
        layer = product.layers[at]
        parameters: Any = layer._parameters
        few = _FEW * layer.in_features

        def forward(given: Tensor) -> Tensor:
            weight, part = parameters["weight"], None
            if given.numel() <= few and not _computes_otherwise(given, weight) and self._is_ready(product):
                if at:
                    part = product.take(given, at)
                else:
                    part = self._divided(product).of(given) if product.left_over else product.first(given)
            return F.linear(given, weight, parameters["bias"]) if part is None else part

        return forward

    def _divided(self, product: Product) -> Product:
        """Let layers that did not all ask for their parts of the last product be alone from now on.

        Returns the first one's product.
        """
        with self._dividing:
            if product in self.products:
                place, alone = self.products.index(product), [Product([layer]) for layer in product.layers]
                for each in alone:
                    each.pack()
                    self._install(each)
                self.products[place : place + 1] = alone
            return next(each for each in self.products if each.layers[0] is product.layers[0])

    def _is_ready(self, product: Product) -> bool:
        """Pack everything if this pass is the first to decode a token; statistics leave these seconds out."""
        if product.is_packed:
            return True
        session = current()
        if session is None or session.step.phase != "decode":
            return False
        before = self.seconds
        self.pack()
        session.cache.turn.record.passes.capture_s += self.seconds - before
        return True


def _computes_otherwise(given: Tensor, weight: Tensor) -> bool:
    """Tell that gradients or another dtype are wanted, which packed weights do not serve."""
    wants_gradient = torch.is_grad_enabled() and (given.requires_grad or weight.requires_grad)
    return wants_gradient or given.dtype != weight.dtype or torch.is_autocast_enabled("cpu")


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and "forward" not in module.__dict__


__all__ = ["PackedLinears"]
