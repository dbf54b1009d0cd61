"""What a plan should cost on a model, from the model's config alone. docs/estimate.md derives the formulas.

The model is built on torch's `meta` device, so parameters are counted exactly and no weight takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvsieve.errors import InputError, PlanError, UnsupportedModelError
from kvsieve.hf.cache import DynamicSlidingWindowLayer
from kvsieve.hf.compat import DynamicLayer, plain_cache_layers
from kvsieve.hf.probe import check_model
from kvsieve.methods import TSP, ScoredEvictor
from kvsieve.methods.base import skipped
from kvsieve.plans import Plan

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


@dataclass(frozen=True)
class Estimate:
    """Predicted costs of one prompt per row; FLOPs and bytes are those of the whole batch.

    deep_tokens: tokens that pass the deepest layer. kv_entries: per layer, per row and stored head, right after the
    prompt. kv_bytes: keys and values stored. matmul_flops, attention_flops: reading the prompt. decode_bytes: read to
    generate one token per row.
    """

    deep_tokens: int
    kv_entries: tuple[int, ...]
    kv_bytes: int
    weight_bytes: int
    matmul_flops: float
    attention_flops: float
    decode_bytes: float

    @property
    def prefill_flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    def prefill_seconds(self, matmul_tflops: float, attention_tflops: float) -> float:
        """Seconds to read the prompt at these achieved rates (10^12 FLOP/s)."""
        return (self.matmul_flops / matmul_tflops + self.attention_flops / attention_tflops) / 1e12

    def decode_seconds(self, bandwidth: float) -> float:
        """Seconds per generated token at this achieved bandwidth (10^9 bytes/s)."""
        return self.decode_bytes / bandwidth / 1e9


def estimate(geometry: Geometry, plan: Plan, tokens: int, *, batch: int = 1, element_bytes: int = 2) -> Estimate:
    """Predict what `plan` costs on a prompt of `tokens` per row.

    element_bytes: bytes of one weight and of one key or value element.

    Raises InputError for a prompt or batch below 1, PlanError for a role whose cost is not known, and
    UnsupportedModelError when kvsieve cannot run the plan on the model.
    """
    if tokens < 1 or batch < 1:
        raise InputError(f"an estimate needs at least 1 token and 1 row, got {tokens} tokens in {batch} rows")
    check_priced(plan)
    if plan.roles:
        check_model(geometry.model, plan)
    layers = geometry.layers
    seen = _tokens_per_layer(plan, len(layers), tokens)
    kept = [_entries(plan, index, layers, seen[index], tokens) for index in range(len(layers))]
    copies = [layer.groups if per_head else 1 for layer, (_, per_head) in zip(layers, kept, strict=True)]
    row_elements = [
        entries * layer.kv_elements * count for layer, (entries, _), count in zip(layers, kept, copies, strict=True)
    ]
    stored = sum(row_elements[index] for index, layer in enumerate(layers) if layer.reads == index)
    read = sum(row_elements[layer.reads] for layer in layers)
    matmul = sum(2 * layer.linear_parameters * n for layer, n in zip(layers, seen, strict=True))
    matmul += 2 * geometry.outside_parameters * tokens + 2 * geometry.head_parameters
    attention = sum(layer.pair_flops * _pairs(n, layer.window) for layer, n in zip(layers, seen, strict=True))
    return Estimate(
        deep_tokens=seen[-1],
        kv_entries=tuple(entries if layers[i].reads == i else 0 for i, (entries, _) in enumerate(kept)),
        kv_bytes=stored * batch * element_bytes,
        weight_bytes=geometry.parameters * element_bytes,
        matmul_flops=matmul * batch,
        attention_flops=attention * batch,
        decode_bytes=(geometry.weights_read(batch) + read * batch) * element_bytes,
    )


def largest_batch(one: Estimate, memory_bytes: float) -> int:
    """Rows whose entries fit beside the weights; `one` is the estimate of a single row. Activations are left out."""
    return max(0, int((memory_bytes - one.weight_bytes) // one.kv_bytes))


def check_priced(plan: Plan) -> None:
    """Raise PlanError for a plan with a part whose cost the formulas do not describe."""
    unknown = [role for role in plan.roles if role not in ("propagate", "evict")]
    if unknown:
        raise PlanError(
            f"estimate cannot price {plan.name!r}: it knows the roles propagate and evict, not {', '.join(unknown)}; "
            "measure it with `kvsieve run` instead"
        )
    for part, known in ((plan.propagate, TSP), (plan.evict, ScoredEvictor)):
        if part is not None and (not isinstance(part, known) or type(part).select is not known.select):
            raise PlanError(
                f"estimate cannot price {plan.name!r}: {type(part).__name__} selects in its own way and only "
                f"{known.__name__}'s is known; measure it with `kvsieve run` instead"
            )


def _tokens_per_layer(plan: Plan, num_layers: int, tokens: int) -> list[int]:
    if not isinstance(plan.propagate, TSP):
        return [tokens] * num_layers
    source = plan.propagate.source(num_layers)
    deep = min(tokens, plan.propagate.rate.entries(tokens, plan.propagate.window))
    return [tokens if index <= source else deep for index in range(num_layers)]


def _entries(plan: Plan, index: int, layers: tuple[Layer, ...], seen: int, tokens: int) -> tuple[int, bool]:
    """Entries a layer holds after the prompt, and whether each query head has its own."""
    layer = layers[index]
    if layer.window is not None:
        # transformers keeps one entry less than the window: the next token brings the last one.
        return min(seen, layer.window - 1), False
    if not isinstance(plan.evict, ScoredEvictor) or skipped(plan.evict.skip_layers, index, len(layers)):
        return seen, False
    kept = min(seen, plan.evict.budget.entries(tokens, plan.evict.minimum))
    return kept, kept < seen and bool(getattr(plan.evict, "per_query_head", False))


def _pairs(tokens: int, window: int | None) -> float:
    """Pairs of a query and a key under a causal mask."""
    reach = tokens if window is None else min(tokens, window)
    return reach * (tokens - reach / 2)


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
