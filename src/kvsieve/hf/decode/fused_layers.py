"""Decoder layers whose operations before and after attention are two compiled calls, for few tokens.

Between the products of one token, Python takes more time than the operations that it calls. Layers are replaced only
if, by the names in their code, their forward consists of exactly the kernel's operations, and a trial of one of each
kind agrees.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.hf.compat import CACHE, CACHE_NAMES
from kvsieve.hf.decode.products import Product
from kvsieve.hf.forward.attention import attention_function
from kvsieve.hf.forward.passes import current
from kvsieve.kernels.cpu import products, quantized
from kvsieve.kernels.cpu.decoder_layer import DecoderLayer, Norm, Operand
from kvsieve.models.quantized import QuantizedLinear

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"
# All that the forward of such a layer, and of its attention, may name; and what the latter may name besides.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {
    *("shape", "head_dim", "q_proj", "k_proj", "v_proj", "o_proj", "view", "transpose", "reshape", "contiguous"),
    *("apply_rotary_pos_emb", "update", "layer_idx", _INTERFACES, "get_interface", "config", "_attn_implementation"),
    *("eager_attention_forward", "training", "attention_dropout", "scaling"),
}
_WINDOW = "sliding_window"
_HEAD_NORMS = ("q_norm", "k_norm")
_FURTHER = {_WINDOW, "getattr", *_HEAD_NORMS}
# Arguments of a layer that its attention takes by name.
_TAKEN = {"hidden_states", "attention_mask", "position_embeddings", *CACHE_NAMES}


class FusedLayers:
    """Decoder layers with fused operations; `install` replaces their forward on the instance, `remove` restores it.

    Args:
        decoder: of a model.
        replaced: modules with fused operations; see `FusedModules`.
        linears: products of plain linear layers; see `Linears`.
    """

    def __init__(
        self, decoder: nn.Module, replaced: Mapping[nn.Module, Any], linears: Mapping[nn.Module, Product]
    ) -> None:
        self._parts = dict(_suitable(decoder, replaced, linears))

    @property
    def count(self) -> int:
        """Layers that are replaced."""
        return len(self._parts)

    def install(self) -> None:
        """Let the layers compute in compiled calls."""
        for layer, parts in self._parts.items():
            parts.note_forwards()
            layer.forward = _forward(layer, parts)

    def remove(self) -> None:
        """Bring the layers' own forward back."""
        for layer in self._parts:
            layer.__dict__.pop("forward", None)


def _suitable(
    decoder: nn.Module, replaced: Mapping[nn.Module, Any], linears: Mapping[nn.Module, Product]
) -> Iterator[tuple[nn.Module, _LayerParts]]:
    """Yield the layers that the kernel computes."""
    known: dict[Any, bool] = {}
    for layer in decoder.modules():
        if _names_of(layer) != _LAYER or "forward" in layer.__dict__:
            continue
        if not all(layer._modules.get(name) in replaced for name in _LAYER):
            continue
        attention: Any = layer._modules["self_attn"]
        names = _names_of(attention)
        if names is None or names - _FURTHER != _ATTENTION:
            continue
        parts = _LayerParts(layer, names, linears)
        if not parts.are_computed(replaced):
            continue
        kind = type(layer), type(attention)
        if kind not in known:
            known[kind] = parts.agree()
        if known[kind]:
            yield layer, parts


def _own_forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names_of(module: nn.Module) -> set[str] | None:
    """Names that the code of a module's forward uses; None where it is no plain function."""
    function = _own_forward(module)
    return set(function.__code__.co_names) if inspect.isfunction(function) else None


def _forward(layer: nn.Module, parts: _LayerParts) -> Callable[..., Any]:
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = parts.run(args[0], kwargs) if len(args) == 1 else None
        return own(*args, **kwargs) if found is None else found

    return forward


class _LayerParts:
    """The parts of a decoder layer.

    Args:
        layer: the layer.
        names: in the code of its attention.
        linears: see FusedLayers.

    Attributes:
        further: arguments of this layer's attention function that not all have.
    """

    def __init__(self, layer: Any, names: set[str], linears: Mapping[nn.Module, Product]) -> None:
        attention = layer.self_attn
        self._layer = layer
        self._attention = attention
        self.further: dict[str, Any] = {}
        if "getattr" in names:
            self.further = {_WINDOW: getattr(attention.config, _WINDOW, None)}
        elif _WINDOW in names:
            self.further = {_WINDOW: attention.sliding_window}
        self._places = (
            *((attention._modules, f"{name}_proj") for name in "qkvo"),
            *((layer.mlp._modules, f"{name}_proj") for name in ("gate", "up", "down")),
        )
        self._linears: tuple[Any, ...] = tuple(held[name] for held, name in self._places)
        head_norms = [attention._modules[name] for name in _HEAD_NORMS if name in names]
        self._norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms]
        modules = *self._norms, attention, layer.mlp, *self._linears
        self._dicts = [module.__dict__ for module in modules]
        self._hooks = [hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._forwards: list[Any] = []
        self._products = [linears.get(linear) for linear in self._linears]
        self._dtype = self._norms[0].weight.dtype
        self._head = int(attention.head_dim)
        self._most = quantized.MOST_ROWS
        if any(product is not None for product in self._products):
            self._most = min(self._most, products.MOST_ROWS.get(self._dtype, 0))
        self._known: tuple[Any, DecoderLayer | None] = None, None

    def are_computed(self, replaced: Mapping[nn.Module, Any]) -> bool:
        """Return True if the kernel computes all of them. replaced: see FusedLayers."""
        of_heads = all(norm in replaced and norm.weight.numel() == self._head for norm in self._norms[2:])
        pairs = zip(self._linears, self._products, strict=True)
        in_blocks = quantized.built().loaded is not None
        linear = all(
            (in_blocks and isinstance(part, QuantizedLinear)) or product is not None for part, product in pairs
        )
        return of_heads and linear and len(self._norms) in (2, 4)

    def note_forwards(self) -> None:
        """Remember how the modules compute: later replacements of their forward are respected."""
        self._forwards = [held.get("forward") for held in self._dicts]

    def run(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the layer's output, or None if the layer's own code must compute it."""
        angles = kwargs.get("position_embeddings")
        cache = kwargs.get(CACHE)
        if angles is None or cache is None or not self._take(hidden, *angles) or current() is None:
            return None
        kernel = self._kernel()
        if kernel is None:
            return None
        attention = self._attention
        query, key, value = kernel.before_attention(hidden, *angles)
        key, value = cache.update(key, value, attention.layer_idx)
        rest = {name: value for name, value in kwargs.items() if name not in _TAKEN}
        mask = kwargs.get("attention_mask")
        attended, _ = attention_function(
            attention, query, key, value, mask, attention.scaling, dropout=0.0, **self.further, **rest
        )
        return kernel.after_attention(attended, hidden)

    def _take(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> bool:
        """Return True if the kernel computes this input, and nobody looks at a part of the layer."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return False
        if type(hidden) is not Tensor or hidden.ndim != 3 or hidden.dtype != self._dtype or not hidden.is_contiguous():
            return False
        if not 0 < hidden.shape[0] * hidden.shape[1] <= self._most or cosine.dtype != self._dtype:
            return False
        if cosine.shape[-1] != self._head or not (cosine.is_contiguous() and sine.is_contiguous()):
            return False
        if any(self._hooks) or [held.get("forward") for held in self._dicts] != self._forwards:
            return False
        return tuple(held[name] for held, name in self._places) == self._linears

    def _kernel(self) -> DecoderLayer | None:
        """Return the layer with its weights as they are now; None if the kernel cannot read one."""
        linears: list[Operand] = []
        for linear, product in zip(self._linears, self._products, strict=True):
            if product is None:
                if linear.dtype != self._dtype:
                    return None
                linears.append(quantized.operand(linear.matrix, linear.bias))
                continue
            weight = product.ready(self._dtype)
            if weight is None:
                return None
            linears.append(products.operand(weight))
        norms: list[Norm] = []
        for norm in self._norms:
            weight = norm.weight
            if weight.dtype != self._dtype or not weight.is_contiguous():
                return None
            norms.append((weight.data_ptr(), norm.variance_epsilon))
        state = linears, norms
        if self._known[0] != state:
            every = norms if len(norms) == 4 else [*norms, (0, 0.0), (0, 0.0)]
            dim = self._norms[0].weight.numel()
            self._known = state, DecoderLayer(linears, every, dim, self._head, self._dtype)
        return self._known[1]

    @torch.no_grad()
    def agree(self) -> bool:
        """Return True if the layer's own code does the same with random numbers."""
        kernel = self._kernel()
        if kernel is None:
            return False
        draw = torch.Generator().manual_seed(0)
        widths = self._norms[0].weight.numel(), self._linears[0].out_features, self._head, self._head
        hidden, attended, *angles = (torch.randn(1, 2, size, generator=draw).to(self._dtype) for size in widths)
        seen: dict[str, Any] = {}
        own = _own_forward(self._attention)
        names = {**own.__globals__, _INTERFACES: _Interfaces(seen, attended.view(1, 2, -1, self._head))}
        probe = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        probe.__kwdefaults__ = own.__kwdefaults__
        normed = self._norms[0](hidden)
        probe(self._attention, hidden_states=normed, position_embeddings=tuple(angles), attention_mask=None)
        found = kernel.before_attention(hidden, *angles)
        if seen["options"] != {"dropout": 0.0, "scaling": self._attention.scaling, **self.further}:
            return False
        if not all(_near(*pair) for pair in zip(found, seen["given"], strict=True)):
            return False
        given: list[Tensor] = []
        output = self._linears[3]
        self._layer._modules["self_attn"] = _Attention(given, output(attended))
        try:
            wanted = self._layer(hidden, attention_mask=None, position_embeddings=tuple(angles))
        finally:
            self._layer._modules["self_attn"] = self._attention
        same = isinstance(wanted, Tensor) and _near(given[0], normed)
        return same and _near(kernel.after_attention(attended, hidden), wanted)


class _Interfaces:
    """A table of attention functions with one that notes what it is given."""

    def __init__(self, seen: dict[str, Any], attended: Tensor) -> None:
        self._seen = seen
        self._attended = attended

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        return self._attend

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        self._seen.update(given=(query, key, value), options=options)
        return self._attended, None


class _Attention(nn.Module):
    """An attention module whose output is known, and that notes what it is given."""

    def __init__(self, given: list[Tensor], output: Tensor) -> None:
        super().__init__()
        self._given = given
        self._output = output

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        self._given.append(hidden_states)
        return self._output, None


def _near(found: Tensor, wanted: Tensor) -> bool:
    bound = 1e-4 if wanted.dtype == torch.float32 else 5e-2
    return found.shape == wanted.shape and bool((found - wanted).float().norm() <= bound * wanted.float().norm())


__all__ = ["FusedLayers"]
