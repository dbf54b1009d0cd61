"""The parts of a decoder layer around attention, which compiled calls compute for few tokens."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.hf.compat import CACHE, CACHE_NAMES
from kvsieve.hf.decode.products import Product
from kvsieve.hf.decode.watch import Fact, Weights, Wiring
from kvsieve.hf.forward.attention import attention_function
from kvsieve.kernels.cpu import products, quantized
from kvsieve.kernels.cpu.decoder_layer import DecoderLayer, Norm, Operand
from kvsieve.models.quantized import QuantizedLinear

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"
_WINDOW = "sliding_window"
_HEAD_NORMS = ("q_norm", "k_norm")
# All that the forward of such a layer, and of its attention, may name; and what the latter may name besides.
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {
    *("shape", "head_dim", "q_proj", "k_proj", "v_proj", "o_proj", "view", "transpose", "reshape", "contiguous"),
    *("apply_rotary_pos_emb", "update", "layer_idx", _INTERFACES, "get_interface", "config", "_attn_implementation"),
    *("eager_attention_forward", "training", "attention_dropout", "scaling"),
}
FURTHER = {_WINDOW, "getattr", *_HEAD_NORMS}
# Arguments of a layer that its attention takes by name.
_TAKEN = {"hidden_states", "attention_mask", "position_embeddings", *CACHE_NAMES}


class LayerParts:
    """The parts of a decoder layer.

    Args:
        layer: the layer.
        names: in the code of its attention.
        linears: see FusedLayers.

    Attributes:
        wiring: the modules' parts and forwards, noted by `note_wiring`.
        weights: those that `kernel` reads; None where copies of some are to come.
    """

    def __init__(self, layer: Any, names: set[str], linears: Mapping[nn.Module, Product]) -> None:
        attention = layer.self_attn
        self._layer = layer
        self._attention = attention
        self._further: dict[str, Any] = {}
        if "getattr" in names:
            self._further = {_WINDOW: getattr(attention.config, _WINDOW, None)}
        elif _WINDOW in names:
            self._further = {_WINDOW: attention.sliding_window}
        places = (
            *((attention._modules, f"{name}_proj") for name in "qkvo"),
            *((layer.mlp._modules, f"{name}_proj") for name in ("gate", "up", "down")),
        )
        self._linears: tuple[Any, ...] = tuple(held[name] for held, name in places)
        head_norms = [(attention._modules, name) for name in _HEAD_NORMS if name in names]
        self._places = *places, *head_norms, *((layer._modules, name) for name in sorted(LAYER))
        own = layer.input_layernorm, layer.post_attention_layernorm
        self._norms: list[Any] = [*own, *(held[name] for held, name in head_norms)]
        self._every = *self._norms, attention, layer.mlp, *self._linears
        self._products = [linears.get(linear) for linear in self._linears]
        self._dtype = self._norms[0].weight.dtype
        self._head = int(attention.head_dim)
        self._most = quantized.MOST_ROWS
        if any(product is not None for product in self._products):
            self._most = min(self._most, products.MOST_ROWS.get(self._dtype, 0))
        self._known: tuple[Any, DecoderLayer | None] = None, None
        self.wiring = Wiring((), (), set())
        self.weights: Weights | None = None

    @property
    def scale(self) -> float:
        """Factor of query-key products."""
        return float(self._attention.scaling)

    @property
    def scaling(self) -> Fact:
        """Where that factor is."""
        return self._attention.__dict__, "scaling", self._attention.scaling

    def are_computed(self, replaced: Mapping[nn.Module, Any]) -> bool:
        """Return True if the kernel computes all of them. replaced: see FusedLayers."""
        of_heads = all(norm in replaced and norm.weight.numel() == self._head for norm in self._norms[2:])
        pairs = zip(self._linears, self._products, strict=True)
        in_blocks = quantized.built().loaded is not None
        linear = all(
            (in_blocks and isinstance(part, QuantizedLinear)) or product is not None for part, product in pairs
        )
        return of_heads and linear and len(self._norms) in (2, 4)

    def note_wiring(self, harmless: set[int]) -> None:
        """Remember how the modules compute: what is done to them later is respected. harmless: see `Wiring`."""
        own = [module.__dict__ for module in self._every]
        facts = [(held, "forward", held.get("forward")) for held in own]
        facts += [(held, name, held[name]) for held, name in self._places]
        hooks = [held for part in self._every for held in (part._forward_hooks, part._forward_pre_hooks)]
        self.wiring = Wiring(facts, hooks, harmless)

    def free(self) -> None:
        """Forget weights."""
        self._known = None, None
        self.weights = None

    def run(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the layer's output, or None if the layer's own code must compute it."""
        angles = kwargs.get("position_embeddings")
        cache = kwargs.get(CACHE)
        if angles is None or cache is None or not self.takes(hidden, *angles) or not self.wiring.hold():
            return None
        kernel = self.kernel()
        if kernel is None:
            return None
        attention = self._attention
        query, key, value = kernel.before_attention(hidden, *angles)
        key, value = cache.update(key, value, attention.layer_idx)
        rest = {name: value for name, value in kwargs.items() if name not in _TAKEN}
        mask = kwargs.get("attention_mask")
        attended, _ = attention_function(
            attention, query, key, value, mask, attention.scaling, dropout=0.0, **self._further, **rest
        )
        return kernel.after_attention(attended, hidden)

    def takes(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> bool:
        """Return True if the kernel computes this input [B, L, C], with these rotary tables."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return False
        if type(hidden) is not Tensor or hidden.ndim != 3 or hidden.dtype != self._dtype or not hidden.is_contiguous():
            return False
        if not 0 < hidden.shape[0] * hidden.shape[1] <= self._most or cosine.dtype != self._dtype:
            return False
        return cosine.shape[-1] == self._head and cosine.is_contiguous() and sine.is_contiguous()

    def kernel(self) -> DecoderLayer | None:
        """Return the layer with its weights as they are now; None if the kernel cannot read one."""
        if self.weights is not None and self.weights.hold():
            return self._known[1]
        self.weights = None
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
            self._known = state, DecoderLayer(linears, every, self._norms[0].weight.numel(), self._head, self._dtype)
        found = [product for product in self._products if product is not None]
        if all(product.is_settled for product in found):
            self.weights = Weights(self._facts(), [product.narrow for product in found if product.narrow is not None])
        return self._known[1]

    def _facts(self) -> Iterator[Fact]:
        """Yield the weights, and facts about their modules that the kernel relies on."""
        for linear, product in zip(self._linears, self._products, strict=True):
            held = linear.__dict__ if product is None else linear._parameters
            names = ("matrix", "dtype") if product is None else ("weight",)
            yield from ((held, name, held[name]) for name in names)
            yield linear._parameters, "bias", linear._parameters["bias"]
        for norm in self._norms:
            yield norm._parameters, "weight", norm._parameters["weight"]
            yield norm.__dict__, "variance_epsilon", norm.variance_epsilon

    @torch.no_grad()
    def agree(self) -> bool:
        """Return True if the layer's own code does the same with random numbers."""
        kernel = self.kernel()
        if kernel is None:
            return False
        draw = torch.Generator().manual_seed(0)
        widths = self._norms[0].weight.numel(), self._linears[0].out_features, self._head, self._head
        hidden, attended, *angles = (torch.randn(1, 2, size, generator=draw).to(self._dtype) for size in widths)
        seen: dict[str, Any] = {}
        own = own_forward(self._attention)
        names = {**own.__globals__, _INTERFACES: _Interfaces(seen, attended.view(1, 2, -1, self._head))}
        probe = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        probe.__kwdefaults__ = own.__kwdefaults__
        normed = self._norms[0](hidden)
        probe(self._attention, hidden_states=normed, position_embeddings=tuple(angles), attention_mask=None)
        found = kernel.before_attention(hidden, *angles)
        if seen["options"] != {"dropout": 0.0, "scaling": self._attention.scaling, **self._further}:
            return False
        if not all(_near(*pair) for pair in zip(found, seen["given"], strict=True)):
            return False
        given: list[Tensor] = []
        self._layer._modules["self_attn"] = _Attention(given, self._linears[3](attended))
        try:
            # Hooks of the layer see the model's own passes only.
            own = own_forward(self._layer)
            wanted = own(self._layer, hidden, attention_mask=None, position_embeddings=tuple(angles))
        finally:
            self._layer._modules["self_attn"] = self._attention
        same = isinstance(wanted, Tensor) and _near(given[0], normed)
        return same and _near(kernel.after_attention(attended, hidden), wanted)


def own_forward(module: nn.Module) -> Any:
    """Return the function of a module's class that computes it, without wrappers."""
    return inspect.unwrap(type(module).forward)


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
