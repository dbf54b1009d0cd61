"""Decoder layers whose operations before and after attention are two compiled calls, for few tokens.

Between the products of one token, Python takes more time than the operations that it calls. Layers are replaced only
if, by the names in their code, their forward consists of exactly the kernel's operations, and a trial of one of each
kind agrees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from kvsieve.hf.compat import layers_of
from kvsieve.hf.decode.layer_parts import ATTENTION, FURTHER, LAYER, LayerParts, own_forward
from kvsieve.hf.decode.products import Product
from kvsieve.hf.decode.token_layers import TokenLayers, computed_before
from kvsieve.hf.forward.passes import current


class FusedLayers:
    """Decoder layers with fused operations; `install` replaces their forward on the instance, `remove` restores it.

    Args:
        decoder: of a model.
        replaced: modules with fused operations; see `FusedModules`.
        linears: products of plain linear layers; see `Linears`.

    Attributes:
        harmless: numbers of hooks on layers that neither change nor look at single tokens of an answer.
    """

    def __init__(self, decoder: Any, replaced: Mapping[nn.Module, Any], linears: Mapping[nn.Module, Product]) -> None:
        self.harmless: set[int] = set()
        self._parts = dict(_suitable(decoder, replaced, linears))
        layers = layers_of(decoder)
        self._token: TokenLayers | None = None
        if layers is not None and self._parts and list(layers) == list(self._parts):
            self._token = TokenLayers(layers, list(self._parts.values()), decoder.config)

    @property
    def count(self) -> int:
        """Layers that are replaced."""
        return len(self._parts)

    def install(self) -> None:
        """Let the layers compute in compiled calls."""
        for number, (layer, parts) in enumerate(self._parts.items()):
            parts.note_wiring(self.harmless)
            layer.forward = _forward(layer, parts, number, self._token)
        if self._token is not None:
            self._token.install(self.harmless)

    def remove(self) -> None:
        """Bring the layers' own forward back."""
        for layer, parts in self._parts.items():
            layer.__dict__.pop("forward", None)
            parts.free()
        if self._token is not None:
            self._token.remove()


def _suitable(
    decoder: nn.Module, replaced: Mapping[nn.Module, Any], linears: Mapping[nn.Module, Product]
) -> Iterator[tuple[nn.Module, LayerParts]]:
    """Yield the layers that the kernel computes."""
    known: dict[Any, bool] = {}
    for layer in decoder.modules():
        if _names_of(layer) != LAYER or "forward" in layer.__dict__:
            continue
        if not all(layer._modules.get(name) in replaced for name in LAYER):
            continue
        attention: Any = layer._modules["self_attn"]
        names = _names_of(attention)
        if names is None or names - FURTHER != ATTENTION:
            continue
        parts = LayerParts(layer, names, linears)
        if not parts.are_computed(replaced):
            continue
        kind = type(layer), type(attention)
        if kind not in known:
            known[kind] = parts.agree()
        if known[kind]:
            yield layer, parts


def _names_of(module: nn.Module) -> set[str] | None:
    """Names that the code of a module's forward uses; None where it is no plain function."""
    function = own_forward(module)
    return set(function.__code__.co_names) if inspect.isfunction(function) else None


def _forward(layer: nn.Module, parts: LayerParts, number: int, token: TokenLayers | None) -> Callable[..., Any]:
    """Return the forward of a layer. token: all of the decoder's, if each is replaced."""
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is None or len(args) != 1:
            return own(*args, **kwargs)
        found = None
        if token is not None:
            found = computed_before(session, number, args[0], kwargs)
            if found is None and not number:
                found = token.run(session, args[0], kwargs)
        if found is not None:
            return found
        found = parts.run(args[0], kwargs)
        if found is None:
            return own(*args, **kwargs)
        if token is not None and not token.linked:
            token.note(session, number, args[0], kwargs, found)
        return found

    return forward
