"""Geometry of plain decoders from a config.json, without torch and transformers."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from kvsieve.hf.shape import LayerKind, LayerShape
from kvsieve.lab.bench.geometry import Geometry, Layer
from kvsieve.models import checkpoint_source, demo

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Types of gated decoders, and parameters of a layer's attention besides its products: biases and norms of heads.
_BIASED = {"qwen2"}
_NORMED = {"qwen3"}
_TYPES = {"llama", "mistral", "phi3", *_BIASED, *_NORMED}
# Settings that make them other decoders.
_OTHER = ("attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "num_experts", "kv_lora_rank")


class PlainConfig:
    """Values of a config.json, as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def get_text_config(self, decoder: bool = True) -> PlainConfig:
        return self


def plain_config(name: str | None) -> PlainConfig | None:
    """Return the config of a local checkpoint with a plain decoder, or None.

    Raises:
        ModelNotFoundError, ModelLoadError: see `checkpoint_source`.
    """
    if name is None:
        folder: str | Path = demo.demo_place()[2]
    else:
        folder, options = checkpoint_source(name)
        if not options["local_files_only"] or "gguf_file" in options:
            return None
    values = None
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return PlainConfig(values) if isinstance(values, dict) and _is_plain(values) else None


def _is_plain(values: dict[str, Any]) -> bool:
    kind = values.get("model_type")
    ends = kind not in {"mistral", "phi3"} or "sliding_window" in values
    if kind == "qwen2" and values.get("use_sliding_window") is False:
        values = {**values, "sliding_window": None}
    sizes = [values.get(name) for name in (*_SIZES, "vocab_size", *(["head_dim"] if kind in _NORMED else []))]
    full = all(layer == "full_attention" for layer in values.get("layer_types") or ())
    same = full and ends and not any(values.get(name) for name in _OTHER)
    return kind in _TYPES and same and all(type(size) is int and size > 0 for size in sizes)


def plain_geometry(config: Any) -> Geometry:
    """Return the geometry of a plain decoder's config; see `bench.geometry.geometry`."""
    width, inner, count, query, heads = (getattr(config, name) for name in _SIZES)
    dim = getattr(config, "head_dim", None) or width // query
    outputs = (query + 2 * heads) * dim
    products = width * outputs + query * dim * width + 3 * width * inner
    more = {"qwen2": outputs, "qwen3": 2 * dim}.get(config.model_type, 0)
    shape = LayerShape(LayerKind(), heads, 2 * heads * dim, (dim, dim), query, 2 * query * dim, 0, 0, False)
    layers = tuple(
        Layer(
            linear_parameters=products,
            outputs=outputs + 2 * width + 2 * inner,
            pair_flops=2 * shape.pair_elements,
            kv_elements=shape.entry_elements,
            groups=query // heads,
            kind=shape.kind,
            sees=shape.kind,
            reads=index,
        )
        for index in range(count)
    )
    head = config.vocab_size * width
    inside = count * (products + more + 2 * width) + width
    tied = getattr(config, "tie_word_embeddings", False)
    return Geometry(
        layers=layers,
        parameters=inside + head * (1 if tied else 2),
        head_parameters=head,
        outside_parameters=0,
        read_parameters=inside + head,
        expert_parameters=0,
        active_share=1.0,
        model=None,
        shapes=(shape,) * count,
    )
