"""Shapes of a model's attention and memory, found by running it on torch's meta device."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.compat import AttentionInterface, DynamicCache, cache_argument, decoder_of, layers_of, text_config
from kvsieve.hf.kinds import layer_kinds
from kvsieve.hf.shape import LayerKind, LayerShape

_NAME = "kvsieve_shapes"
_TOKENS = 2


@dataclass
class _Seen:
    """Events of the pass: the layer that runs, tokens that entered each, query heads and sizes of its attention."""

    layer: int = -1
    entered: dict[int, list[int]] = field(default_factory=dict)
    attended: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)


def meta_model(config: Any) -> Any:
    """Return the model of a config, without weights.

    Raises:
        UnsupportedModelError: transformers builds no decoder from it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from kvsieve.models.demo import quiet_transformers

    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder")
    # Some composite configurations also stand for their text part alone.
    whole = (
        config.get_text_config(decoder=True) is not config or type(config) not in AutoModelForCausalLM._model_mapping
    )
    auto: Any = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    try:
        with quiet_transformers(), torch.device("meta"):
            # That dtype identifies states in float32.
            return auto.from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UnsupportedModelError(
            f"transformers builds no causal language model from its config ({cause})"
        ) from error


def layer_shapes(model: Any) -> tuple[LayerShape, ...]:
    """Return the shapes of the layers of a model on the meta device, in a dtype other than float32.

    Raises:
        UnsupportedModelError: a layer is of an unknown kind, or the model cannot be run without weights.
    """
    config = text_config(model)
    kinds = layer_kinds(config)
    decoder = decoder_of(model)
    layers = layers_of(decoder)
    if layers is None or len(layers) != len(kinds):
        raise UnsupportedModelError(f"its decoder has no list of {len(kinds)} layers, as many as its cache")
    cache = DynamicCache(config=config)
    seen = _Seen()
    try:
        with _watched(model, layers, seen):
            _run(decoder, cache, any(kind.entries == "shared" for kind in kinds))
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UnsupportedModelError(f"transformers cannot run it without weights ({cause})") from error
    # Older transformers list only the layers that have a cache of their own.
    cache_layers = [*cache.layers, *[None] * (len(kinds) - len(cache.layers))]
    return tuple(_shape(model, index, kind, cache_layers[index], seen) for index, kind in enumerate(kinds))


def _run(decoder: Any, cache: DynamicCache, shares: bool) -> None:
    names = inspect.signature(decoder.forward).parameters
    arguments: dict[str, Any] = {cache_argument(decoder): cache, "use_cache": True}
    if shares and any(name.kind is inspect.Parameter.VAR_KEYWORD for name in names.values()):
        # As generate does, which lets some models leave out the rest of the prompt in layers that store nothing.
        arguments["logits_to_keep"] = 1
    with torch.no_grad(), torch.device("meta"):
        decoder(input_ids=torch.ones(1, _TOKENS, dtype=torch.long), **arguments)


@contextlib.contextmanager
def _watched(model: Any, layers: Any, seen: _Seen) -> Iterator[None]:
    """Record the inputs of the layers and of their attention; experts, which need actual numbers, are skipped."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.attended.setdefault(seen.layer, []).append((query.shape[1], key.shape[-1], value.shape[-1]))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def entering(index: int) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen.layer = index
            seen.entered.setdefault(index, []).append(hidden.shape[-2])

        return enter

    AttentionInterface.register(_NAME, attend)
    experts = [module for name, module in model.named_modules() if name.endswith("experts")]
    before = model.config._attn_implementation
    handles = [layer.register_forward_pre_hook(entering(index), with_kwargs=True) for index, layer in enumerate(layers)]
    try:
        for module in experts:
            module.forward = lambda hidden, *args, **kwargs: hidden
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for module in experts:
            del module.forward
        for handle in handles:
            handle.remove()


def _shape(model: Any, index: int, kind: LayerKind, memory: Any, seen: _Seen) -> LayerShape:
    config = text_config(model)
    entered = seen.entered.get(index, [])
    attended = seen.attended.get(index, [])
    if len(entered) != 1:
        raise UnsupportedModelError(f"layer {index} runs {len(entered)} times for each token")
    keys: Any = getattr(memory, "keys", None)
    values: Any = getattr(memory, "values", None)
    state = [part for name in ("conv_states", "recurrent_states") for part in tensors_in(getattr(memory, name, None))]
    stores = kind.entries not in ("shared", "none")
    if (stores and (keys is None or values is None)) or (kind.state and not state):
        raise UnsupportedModelError(f"layer {index} ({kind.words}) keeps what it remembers outside transformers' cache")
    heads = entry = 0
    dims = (0, 0)
    if stores:
        heads = keys.shape[1]
        dims = (keys.shape[-1], values.shape[-1])
        entry = heads * sum(dims)
        # Attention outside transformers' interface is assumed to have the config's heads.
        attended = attended or [(config.num_attention_heads, *dims)]
    wide = sum(part.numel() for part in state if part.dtype == torch.float32)
    return LayerShape(
        kind=kind,
        heads=heads,
        entry_elements=entry,
        dims=dims,
        query_heads=attended[0][0] if attended else 0,
        pair_elements=sum(queries * (key + value) for queries, key, value in attended),
        state_elements=sum(part.numel() for part in state) - wide,
        wide_state_elements=wide,
        last_token_only=entered[0] < _TOKENS,
    )
