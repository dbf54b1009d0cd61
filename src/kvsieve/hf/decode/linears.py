"""Linear layers whose products of few tokens are computed in C, from the weights as they lie in memory.

A product of one token is bound by reading the weight, which torch's own products do at a fraction of the memory's
speed; those of many tokens stay torch's. On a processor without bfloat16, where torch emulates it,
they are torch's products in float32 of copies of parts of the weight (benchmarks/speed/cpu_kinds.py --dtype bfloat16).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.devices import cpu_computes_bfloat16
from kvsieve.hf.decode.narrow import why_not_narrow
from kvsieve.hf.decode.products import Product, is_readable
from kvsieve.kernels.cpu import products as kernel

_log = logging.getLogger(__name__)

# Tokens, and numbers of a weight, that are copied to float32 at a time.
_TOKENS = 2048
_NUMBERS = 2**23


class Linears:
    """The plain linear layers of a decoder; `install` replaces their forward on the instance, `remove` restores it.

    Args:
        decoder: of a model.
        output: the model's output layer, treated like the decoder's.
        narrow: read float32 weights from bfloat16 copies if memory allows them and these have the same numbers; see
            `NarrowWeight`.

    Attributes:
        layers: replaced layers.
        products: one of each layer.

    Raises:
        ValueError: there is no suitable layer, or no kernel; with the reason.
    """

    def __init__(self, decoder: nn.Module, output: nn.Module | None = None, *, narrow: bool = False) -> None:
        modules = dict.fromkeys((*decoder.modules(), *(() if output is None else (output,))))
        self.layers = [module for module in modules if isinstance(module, nn.Linear) and _is_plain(module)]
        if not self.layers:
            raise ValueError("it has no linear layers with plain weights in float32 or bfloat16 on a CPU")
        if kernel.built().reason is not None:
            raise ValueError(f"products of few tokens are compiled, which is {kernel.built().status}")
        if narrow:
            reason = why_not_narrow(self.layers)
            narrow = reason is None
            if reason is not None:
                _log.info("weights are read as they lie: %s", reason)
        self.products = [Product(layer, narrow) for layer in self.layers]

    @property
    def count(self) -> int:
        """Layers that are served."""
        return len(self.layers)

    @property
    def by_layer(self) -> dict[nn.Module, Product]:
        """Products by their layers."""
        return dict(zip(self.layers, self.products, strict=True))

    @property
    def narrow_bytes(self) -> int:
        """Bytes that copies of weights take now."""
        return sum(product.narrow.nbytes for product in self.products if product.narrow is not None)

    def install(self) -> None:
        """Patch the layers' forward to use C for few tokens."""
        for layer, product in zip(self.layers, self.products, strict=True):
            layer.forward = _forward(layer, product)  # type: ignore[assignment, method-assign]

    def look(self) -> None:
        """See NarrowWeight.look."""
        for product in self.products:
            product.look()

    def remove(self) -> None:
        """Bring the layers' own forward back."""
        for layer, product in zip(self.layers, self.products, strict=True):
            layer.__dict__.pop("forward", None)
            product.free()


def _forward(layer: nn.Linear, product: Product) -> Callable[[Tensor], Tensor]:
    parameters: Any = layer._parameters
    # Numbers of an input up to which its product is the kernel's.
    width = layer.in_features
    few = kernel.MOST_ROWS[layer.weight.dtype] * layer.in_features
    widens = layer.weight.dtype == torch.bfloat16 and not cpu_computes_bfloat16()

    # Called hundreds of times per token.
    def forward(given: Tensor) -> Tensor:
        if 0 < given.numel() <= few and not _computes_otherwise(given, parameters, width):
            found = product.of(given)
            if found is not None:
                return found
        elif widens and given.numel() and not _computes_otherwise(given, parameters, width):
            weight = parameters["weight"]
            bias = parameters["bias"]
            if is_readable(weight, bias):
                return _widened(given, weight, bias)
        return F.linear(given, parameters["weight"], parameters["bias"])

    return forward


def _widened(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Product of many tokens, computed in float32 from copies of parts of the weight; its dtype is the input's."""
    tokens = given.reshape(-1, given.shape[-1])
    out = given.new_empty(len(tokens), len(weight))
    step = max(_NUMBERS // weight.shape[1], 1)
    for at in range(0, len(weight), step):
        rows = slice(at, at + step)
        part = weight[rows].float()
        own = None if bias is None else bias[rows].float()
        for start in range(0, len(tokens), _TOKENS):
            some = slice(start, start + _TOKENS)
            out[some, rows] = F.linear(tokens[some].float(), part, own)
    return out.view(*given.shape[:-1], len(weight))


def _computes_otherwise(given: Tensor, parameters: Mapping[str, Any], width: int) -> bool:
    """Return True if gradients, another dtype, a trace or an error are required, which the kernel does not support."""
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
