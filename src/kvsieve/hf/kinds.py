"""Kinds of decoder layers: the memory each has of earlier tokens, from the model's configuration."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.compat import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    plain_cache_layers,
)
from kvsieve.hf.shape import LayerKind, describe_kinds, growing_layers

# Parts of a recurrent layer in transformers, each a dict with one value per state.
STATE_FIELDS = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
# Further attributes, or those created with the first state or entry.
_BESIDE = {"device", "dtype", "keys", "values", "max_batch_size", "num_heads"}


_KINDS: dict[type, LayerKind] = {
    DummyLayer: LayerKind("none"),
    DynamicLayer: LayerKind(),
    DynamicSlidingWindowLayer: LayerKind("window"),
    LinearAttentionLayer: LayerKind("none", state=True),
    LinearAttentionAndFullAttentionLayer: LayerKind("growing", state=True),
    LinearAttentionAndSlidingWindowAttentionLayer: LayerKind("window", state=True),
}


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return the kind of every decoder layer.

    Args:
        config: of the model's decoder.

    Raises:
        UnsupportedModelError: a layer is of an unknown kind.
    """
    types = getattr(config, "layer_types", None) or ()
    kinds: list[LayerKind] = []
    for index, layer in enumerate(plain_cache_layers(config)):
        kind = _KINDS.get(type(layer))
        if kind is None:
            raise UnsupportedModelError(
                f"layer {index} is of a kind that kvsieve does not know, {type(layer).__name__} of transformers"
            )
        if kind.state:
            _check_copyable(index, layer)
        if kind.entries == "window":
            layer_type = types[index] if index < len(types) else None
            chunked = layer_type == "chunked_attention" or (
                layer_type is None and getattr(config, "sliding_window", None) is None
            )
            kind = LayerKind("chunk" if chunked else "window", kind.state, layer.sliding_window)
        elif kind.entries == "none" and index < len(types) and types[index] in ("moe", "mlp"):
            kind = LayerKind("none")
        elif kind.entries == "growing" and getattr(config, "kv_lora_rank", None):
            kind = LayerKind("latent", kind.state)
        kinds.append(kind)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    own = config.num_hidden_layers - shared if shared else len(kinds)
    # Who shares reads the last layer before that has its own entries and is of the same type.
    for index in range(own, own + shared):
        source = max(before for before in range(own) if types[before] == types[index])
        kinds[index : index + 1] = [LayerKind("shared", source=source)]
    return tuple(kinds)


def _check_copyable(index: int, layer: Any) -> None:
    """Raise UnsupportedModelError for a recurrent layer with more than the known parts of its state."""
    known = {*STATE_FIELDS, *_BESIDE}
    more = [
        name
        for name, part in vars(layer).items()
        if name not in known and (part is None or isinstance(part, (dict, list, Tensor)))
    ]
    if more:
        raise UnsupportedModelError(
            f"layer {index} is recurrent and keeps {', '.join(more)} beside the state that kvsieve can copy"
        )


__all__ = ["STATE_FIELDS", "LayerKind", "describe_kinds", "growing_layers", "layer_kinds"]
