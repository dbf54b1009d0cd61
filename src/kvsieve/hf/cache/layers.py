"""Construction of the cache's layers by the kind of decoder layer."""

from __future__ import annotations

from kvsieve.attention import Window
from kvsieve.hf.cache.latent import LatentLayer
from kvsieve.hf.cache.layer import SieveLayer, WindowLayer
from kvsieve.hf.cache.states import CacheLayer, EmptyLayer, StateLayer, StateSieveLayer, StateWindowLayer
from kvsieve.hf.kinds import LayerKind


def new_layer(kind: LayerKind, number_of_states: int = 1) -> CacheLayer:
    """Return an empty layer.

    Args:
        kind: of the decoder layer.
        number_of_states: states that transformers keeps of a recurrent layer.
    """
    if kind.entries in ("window", "chunk"):
        assert kind.span is not None
        window = Window(kind.span, chunked=kind.entries == "chunk")
        return StateWindowLayer(number_of_states, window) if kind.state else WindowLayer(window)
    if kind.entries == "growing":
        return StateSieveLayer(number_of_states) if kind.state else SieveLayer()
    if kind.entries == "latent":
        assert not kind.state
        return LatentLayer()
    return StateLayer(number_of_states) if kind.state else EmptyLayer(kind.source)


def kind_of(layer: CacheLayer) -> LayerKind:
    """Return the kind of decoder layer of a cache layer."""
    if layer.window is not None:
        return LayerKind("chunk" if layer.window.chunked else "window", layer.has_state, layer.window.span)
    if layer.memory is not None:
        return LayerKind("latent" if layer.is_latent else "growing", layer.has_state)
    if layer.source is not None:
        return LayerKind("shared", source=layer.source)
    return LayerKind("none", layer.has_state)
