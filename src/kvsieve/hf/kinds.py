"""Kinds of decoder layers: the memory each has of earlier tokens, from the model's configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

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

Entries = Literal["growing", "latent", "window", "chunk", "shared", "none"]

# What transformers keeps of a recurrent layer, each a dict with one value per state.
STATE_FIELDS = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
# What may lie beside them, or comes with the first state or entry.
_BESIDE = {"device", "dtype", "keys", "values", "max_batch_size", "num_heads"}


@dataclass(frozen=True)
class LayerKind:
    """Kind of one decoder layer: the memory of earlier tokens that it has.

    Attributes:
        entries: "growing", keys and values of every token, which plans act on; "latent", the same in compressed form;
            "window", those of the last `span` tokens; "chunk", those of the tokens since the last multiple of `span`;
            "shared", those of the layer `source`; "none", no entries.
        state: True where it has recurrent state, of a size that does not grow (linear attention, state spaces,
            convolutions), alone or beside entries.
        span: tokens of a window or chunk.
        source: index of the layer whose entries it reads.
    """

    entries: Entries = "growing"
    state: bool = False
    span: int | None = None
    source: int | None = None

    @property
    def grows(self) -> bool:
        """True where entries of every token are kept: what plans act on."""
        return self.entries in ("growing", "latent")

    @property
    def words(self) -> str:
        """Its name in messages and tables."""
        text = {
            "growing": "full attention",
            "latent": "latent attention",
            "window": f"sliding window of {self.span}",
            "chunk": f"attention in chunks of {self.span}",
            "shared": f"KV shared with layer {self.source}",
            "none": "recurrent" if self.state else "no KV",
        }[self.entries]
        return f"{text} and recurrent" if self.state and self.entries != "none" else text


_KINDS: dict[type, LayerKind] = {
    DummyLayer: LayerKind("none"),
    DynamicLayer: LayerKind(),
    DynamicSlidingWindowLayer: LayerKind("window"),
    LinearAttentionLayer: LayerKind("none", state=True),
    LinearAttentionAndFullAttentionLayer: LayerKind("growing", state=True),
    LinearAttentionAndSlidingWindowAttentionLayer: LayerKind("window", state=True),
}


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """Tell the kind of every decoder layer.

    Args:
        config: of the model's decoder.

    Raises:
        UnsupportedModelError: a layer is of a kind that kvsieve does not know.
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
    """Raise UnsupportedModelError for a recurrent layer that keeps more than is known to be its state."""
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


def growing_layers(kinds: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Indices of the layers that plans act on."""
    return tuple(index for index, kind in enumerate(kinds) if kind.grows)


# In the singular and in the plural.
_NAMES = {
    "window": ("has a sliding window", "have a sliding window"),
    "chunk": ("attends in chunks", "attend in chunks"),
    "shared": ("shares another layer's KV", "share another layer's KV"),
    "state": ("is recurrent", "are recurrent"),
    "none": ("holds nothing", "hold nothing"),
}


def describe_kinds(kinds: tuple[LayerKind, ...]) -> str:
    """Say what a model's layers hold, such as "16 of 64 layers hold KV that grows, 48 are recurrent"."""
    grows, both = len(growing_layers(kinds)), sum(kind.state and kind.entries != "none" for kind in kinds)
    latent = sum(kind.entries == "latent" for kind in kinds)
    whole = "all" if grows == len(kinds) else f"{grows} of"
    parts = [f"{whole} {len(kinds)} layers hold KV that grows"]
    others = Counter("state" if kind.entries == "none" and kind.state else kind.entries for kind in kinds)
    parts += [f"{latent} of them as latents"] * (latent > 0)
    parts += [f"{others[name]} {words[others[name] > 1]}" for name, words in _NAMES.items() if others[name]]
    return ", ".join(parts + [f"{both} also {'have' if both > 1 else 'has'} recurrent state"] * (both > 0))


__all__ = ["STATE_FIELDS", "LayerKind", "describe_kinds", "growing_layers", "layer_kinds"]
