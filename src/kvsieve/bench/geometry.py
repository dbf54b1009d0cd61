"""A model as far as costs go: parameters, attention and KV elements of each layer, from its config alone.

The model is built on torch's `meta` device, so parameters are counted exactly and no weight takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.compat import DynamicLayer, DynamicSlidingWindowLayer, plain_cache_layers

_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_FUSED = ("qkv_proj", "query_key_value", "qkv")


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Hq query heads, H KV heads.

    linear_parameters: multiplied once per token (2 FLOPs each), of a mixture's experts only the active share.
    pair_flops: attention FLOPs per pair of a query and a key, all heads.
    kv_elements: key and value elements per token and row. groups: Hq / H.
    window: tokens a query may see, itself included; None for all.
    reads: index of the layer whose entries it attends to, its own unless layers share them.
    """

    linear_parameters: float
    pair_flops: float
    kv_elements: int
    groups: int
    window: int | None
    reads: int


@dataclass(frozen=True)
class Geometry:
    """A model as far as costs go.

    parameters: all, tied ones once. head_parameters: of the output layer. outside_parameters: linear ones outside the
    layers that every token passes. read_parameters: read for any token, without embedding tables and experts.
    expert_parameters: of all experts, of which a token takes `active_share`. model: it, on the meta device.
    """

    layers: tuple[Layer, ...]
    parameters: int
    head_parameters: int
    outside_parameters: int
    read_parameters: int
    expert_parameters: int
    active_share: float
    model: Any = field(repr=False, compare=False)

    def weights_read(self, batch: int) -> float:
        """Parameters read to decode one token in each of `batch` rows; routing is taken to be even."""
        return self.read_parameters + self.expert_parameters * (1 - (1 - self.active_share) ** batch)


def geometry(config: Any) -> Geometry:
    """The costs' side of a causal language model's transformers config; nothing is downloaded or loaded.

    Raises UnsupportedModelError for a model whose cost the formulas do not describe.
    """
    if reason := _refusal(config):
        raise _unsupported(config, reason)
    model = _meta_model(config)
    decoder_layers = getattr(model.get_decoder(), "layers", None)
    if decoder_layers is None:
        raise _unsupported(config, "its decoder keeps its layers where kvsieve does not find them (no .layers)")
    kinds = _cache_kinds(config)
    # Older transformers list only the layers that have a cache of their own.
    kinds += [None] * (len(decoder_layers) - len(kinds))
    for kind in kinds:
        plain = type(kind) in (DynamicLayer, DynamicSlidingWindowLayer)
        if kind is not None and not plain and type(kind).__name__ != "DummyLayer":
            raise _unsupported(config, f"it has layers that are not plain attention ({type(kind).__name__})")
    experts, share = _experts(config, decoder_layers)
    layers = _layers(config, decoder_layers, kinds, share)
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = model.get_output_embeddings()
    head_parameters = head.weight.numel() if head is not None else 0
    inside = {id(p) for layer in decoder_layers for p in layer.parameters()}
    outside = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and id(p) not in inside | tables and (head is None or p is not head.weight)
    )
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = sum(p.numel() for p in model.parameters() if id(p) in tables and (head is None or p is not head.weight))
    return Geometry(
        layers=layers,
        parameters=parameters,
        head_parameters=head_parameters,
        outside_parameters=outside,
        read_parameters=parameters - looked_up - experts,
        expert_parameters=experts,
        active_share=share,
        model=model,
    )


def _refusal(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if config.get_text_config(decoder=True) is not config:
        return "it is a multimodal model"
    if getattr(config, "kv_lora_rank", None):
        return "its latent attention does not store keys and values as they are"
    if getattr(config, "index_topk", None):
        return "its indexed attention chooses what to read by itself"
    if getattr(config, "attention_chunk_size", None):
        return "its chunked attention reads neither all tokens nor a sliding window"
    if config.model_type == "diffllama":
        return "its differential attention attends twice"
    if config.model_type.startswith("gemma4") and getattr(config, "num_kv_shared_layers", None):
        return "its layers that share keys and values may read only the prompt's last token"
    return None


def _unsupported(config: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"estimate cannot price a model of type {config.model_type!r}: {reason}; it expects a decoder whose layers are "
        "plain or sliding-window attention"
    )


def _meta_model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from kvsieve.models.demo import quiet_transformers

    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise _unsupported(config, f"transformers builds no causal language model from its config ({cause})") from error


def _cache_kinds(config: Any) -> list[Any]:
    try:
        return list(plain_cache_layers(config))
    except Exception as error:
        raise _unsupported(config, f"transformers does not tell its layers' kinds ({error})") from error


def _is_expert(name: str) -> bool:
    return ".experts." in f".{name}"


def _experts(config: Any, decoder_layers: Any) -> tuple[int, float]:
    """Parameters of all routed experts, and the share of them one token takes."""
    sizes = [(p.numel(), p.shape[0]) for layer in decoder_layers for n, p in layer.named_parameters() if _is_expert(n)]
    if not sizes:
        return 0, 1.0
    active = next((getattr(config, name) for name in _ACTIVE_EXPERTS if getattr(config, name, None)), None)
    numbers = {count for _, count in sizes}
    if not isinstance(active, int) or len(numbers) != 1:
        raise _unsupported(config, "its config does not tell how many of its experts a token takes")
    return sum(size for size, _ in sizes), min(1.0, active / numbers.pop())


def _layers(config: Any, decoder_layers: Any, kinds: list[Any], share: float) -> tuple[Layer, ...]:
    names = getattr(config, "layer_types", None) or ["full_attention"] * len(kinds)
    configs = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    layers: list[Layer] = []
    for index, (module, kind) in enumerate(zip(decoder_layers, kinds, strict=True)):
        linear = sum(
            p.numel() * (share if _is_expert(name) else 1)
            for name, p in module.named_parameters()
            if p.ndim >= 2 and not name.endswith("bias")
        )
        if isinstance(kind, DynamicLayer):
            window = getattr(kind, "sliding_window", None)
            layers.append(Layer(linear, *_attention(config, configs[index], module), window, index))
            continue
        # A layer without a cache of its own attends to the last layer of its type that has one.
        owners = [i for i, layer in enumerate(layers) if layer.reads == i and names[i] == names[index]]
        if not owners:
            raise _unsupported(config, f"its layer {index} has no attention or shares entries in an unknown way")
        owner = layers[owners[-1]]
        layers.append(Layer(linear, owner.pair_flops, owner.kv_elements, owner.groups, owner.window, owners[-1]))
    return tuple(layers)


def _attention(config: Any, layer_config: Any, layer: nn.Module) -> tuple[float, int, int]:
    """pair_flops, kv_elements and groups of a layer, from its projections."""
    heads = layer_config.num_attention_heads
    stated_kv = getattr(layer_config, "num_key_value_heads", None) or heads
    size = getattr(layer_config, "head_dim", None) or config.hidden_size // heads
    for module in layer.modules():
        keys, values = (getattr(module, name, None) for name in ("k_proj", "v_proj"))
        if isinstance(keys, nn.Linear) and isinstance(values, nn.Linear):
            size = getattr(module, "head_dim", size)
            key_elements, value_elements = keys.out_features, values.out_features
            break
    else:
        fused = [m.out_features for n, m in layer.named_modules() if isinstance(m, nn.Linear) and n.endswith(_FUSED)]
        if fused != [(heads + 2 * stated_kv) * size]:
            raise _unsupported(config, "its key and value projections are not where its config puts them")
        key_elements = value_elements = stated_kv * size
    kv_heads, rest = divmod(key_elements, size)
    if rest or heads % kv_heads or value_elements % kv_heads:
        raise _unsupported(config, f"its {heads} query heads of {size} do not fit keys of {key_elements} elements")
    groups = heads // kv_heads
    return 2 * groups * (key_elements + value_elements), key_elements + value_elements, groups
