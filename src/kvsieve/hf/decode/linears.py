"""Linear layers whose products of few tokens are computed in C, from the weights as they lie in memory.

A product of one token is bound by reading the weight, which torch's own products do at a fraction of the memory's speed
(benchmarks/products.py); those of many tokens stay torch's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.hf.decode.narrow import why_not_narrow
from kvsieve.hf.decode.products import Product, is_readable, together
from kvsieve.kernels.cpu import products as kernel

_log = logging.getLogger(__name__)


class Linears:
    """The plain linear layers of a decoder; `install` replaces their forward on the instance, `remove` brings it back.

    Args:
        decoder: of a model.
        output: the model's output layer, which is served like the decoder's.
        joint: layers that read the same input are one product; see `together`.
        narrow: float32 weights are read from copies in bfloat16 where memory allows them and these hold the same
            numbers; see `NarrowWeights`.

    Attributes:
        layers: that are served.
        products: of which several layers may be one.

    Raises:
        ValueError: there is no layer to serve, or no kernel; with the reason.
    """

    def __init__(
        self, decoder: nn.Module, output: nn.Module | None = None, *, joint: bool = True, narrow: bool = False
    ) -> None:
        modules = dict.fromkeys((*decoder.modules(), *(() if output is None else (output,))))
        self.layers = [module for module in modules if isinstance(module, nn.Linear) and _is_plain(module)]
        if not self.layers:
            raise ValueError("it has no linear layers with plain weights in float32 or bfloat16 on a CPU")
        if kernel.built().reason is not None:
            raise ValueError(f"products of few tokens are compiled, which is {kernel.built().told}")
        if narrow:
            reason = why_not_narrow(self.layers)
            narrow = reason is None
            if reason is not None:
                _log.info("weights are read as they lie: %s", reason)
        self._narrow = narrow
        self.products = [self._product(each) for each in (together(decoder, self.layers) if joint else ())]
        among = {layer for product in self.products for layer in product.layers}
        self.products += [self._product([layer]) for layer in self.layers if layer not in among]
        # Several threads may generate at once.
        self._dividing = threading.Lock()

    @property
    def count(self) -> int:
        """Layers that are served."""
        return len(self.layers)

    @property
    def narrow_bytes(self) -> int:
        """Bytes that copies of weights take now."""
        return sum(product.narrow.nbytes for product in self.products if product.narrow is not None)

    def install(self) -> None:
        """Let the layers compute few tokens in C."""
        for product in self.products:
            self._install(product)

    def remove(self) -> None:
        """Bring the layers' own forward back."""
        for module in self.layers:
            module.__dict__.pop("forward", None)
        for product in self.products:
            product.free()

    def _product(self, layers: Sequence[nn.Linear]) -> Product:
        return Product(layers, self._narrow)

    def _install(self, product: Product) -> None:
        for at, layer in enumerate(product.layers):
            one = self._alone(product) if len(product.layers) == 1 else self._among(product, at)
            layer.forward = one  # type: ignore[assignment, method-assign]

    def _alone(self, product: Product) -> Callable[[Tensor], Tensor]:
        layer = product.layers[0]
        parameters: Any = layer._parameters
        width, few = layer.in_features, _few(layer)

        # Called hundreds of times per token, as is the next one.
        def forward(given: Tensor) -> Tensor:
            if 0 < given.numel() <= few and not _computes_otherwise(given, parameters, width):
                parts = product.of(given)
                if parts is not None:
                    return parts[0]
            return F.linear(given, parameters["weight"], parameters["bias"])

        return forward

    def _among(self, product: Product, at: int) -> Callable[[Tensor], Tensor]:
        """Return the forward of one of several layers: the first multiplies for all, the others take their parts."""
        layer = product.layers[at]
        parameters: Any = layer._parameters
        width, few = layer.in_features, _few(layer)

        def forward(given: Tensor) -> Tensor:
            part = None
            if 0 < given.numel() <= few and not _computes_otherwise(given, parameters, width):
                if at:
                    part = product.take(given, at)
                elif product.left_over:
                    parts = self._divided(product).of(given)
                    part = None if parts is None else parts[0]
                else:
                    part = product.first(given)
            return F.linear(given, parameters["weight"], parameters["bias"]) if part is None else part

        return forward

    def _divided(self, product: Product) -> Product:
        """Let layers that did not all ask for their parts of the last product be alone from now on.

        Returns the first one's product.
        """
        with self._dividing:
            if product in self.products:
                place, alone = self.products.index(product), [self._product([layer]) for layer in product.layers]
                for each in alone:
                    self._install(each)
                self.products[place : place + 1] = alone
            return next(each for each in self.products if each.layers[0] is product.layers[0])


def _few(layer: nn.Linear) -> int:
    """Numbers of an input up to which a layer's product is the kernel's."""
    return kernel.MOST_ROWS[layer.weight.dtype] * layer.in_features


def _computes_otherwise(given: Tensor, parameters: Mapping[str, Any], width: int) -> bool:
    """Tell that gradients, another dtype, a trace or an error are wanted, which the kernel does not serve."""
    weight = parameters["weight"]
    if torch.is_grad_enabled():
        bias = parameters["bias"]
        if given.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad):
            return True
    if given.dtype != weight.dtype or given.shape[-1] != width or type(given) is not Tensor or not given.is_cpu:
        return True
    return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    return is_readable(module.weight, module.bias)


__all__ = ["Linears"]
