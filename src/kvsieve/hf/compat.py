"""Every fact about transformers' versions and private names, and about torch's private names, in one place."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor
from torch.nn import ModuleList
from transformers import AttentionInterface as AttentionInterface
from transformers import AttentionMaskInterface as AttentionMaskInterface
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import CacheLayerMixin as CacheLayerMixin
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.cache_utils import DynamicLayer as DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as DynamicSlidingWindowLayer
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer as LinearAttentionAndFullAttentionLayer
from transformers.cache_utils import (
    LinearAttentionAndSlidingWindowAttentionLayer as LinearAttentionAndSlidingWindowAttentionLayer,
)
from transformers.cache_utils import LinearAttentionLayer as LinearAttentionLayer
from transformers.masking_utils import causal_mask_function as causal_mask_function
from transformers.masking_utils import sdpa_mask as sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import TransformersKwargs
from transformers.utils.deprecation import deprecate_kwarg

from kvsieve.errors import KvsieveError

try:
    from transformers.cache_utils import DummyLayer as DummyLayer
except ImportError:
    # Older releases give layers without attention an empty layer of this class.
    DummyLayer = LinearAttentionLayer  # type: ignore[misc, assignment]

MINIMUM = (5, 16)

# Names of a pass's cache argument, newest first; later releases still accept older ones.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The one among them that this release's generate, models and their outputs have.
CACHE = "cache" if "cache" in {item.name for item in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"

# The code of functions that take arguments by older names.
_RENAMING = deprecate_kwarg("old", "0", new_name="new")(lambda new: new).__code__

# Methods of a cache class of a model's own that hf/cache/own_class.py has.
LINEAR_CACHE = {"get_linear_cache", "set_linear_cache"}

# How transformers names the parts of its mask functions that restrict causal attention to a window or a chunk.
_LOCAL = {f"{name}_overlay.<locals>.inner_mask" for name in ("sliding_window", "chunked")}


def check_version() -> None:
    """Raise KvsieveError when the installed transformers is outside the range kvsieve was written for."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not MINIMUM <= found < (6, 0):
        raise KvsieveError(
            f"transformers {transformers.__version__} is installed, kvsieve needs >= {MINIMUM[0]}.{MINIMUM[1]}, < 6: "
            f"pip install 'transformers>={MINIMUM[0]}.{MINIMUM[1]},<6'"
        )


def text_config(model: Any) -> Any:
    """The configuration of the model's decoder."""
    return model.config.get_text_config(decoder=True)


def decoder_of(model: Any) -> Any:
    """The part of a model that is its text decoder, without the output layer."""
    decoder = model.get_decoder()
    if layers_of(decoder) is not None:
        return decoder
    # Some models name a whole causal language model, or themselves.
    return next((part for part in decoder.children() if layers_of(part) is not None), decoder)


def layers_of(decoder: Any) -> Any | None:
    """The decoder's layers, an nn.ModuleList; None where they are not found."""
    for name in ("layers", "h", "blocks"):
        found = getattr(decoder, name, None)
        if isinstance(found, ModuleList):
            return found
    return None


def forget_positions(model: Any) -> None:
    """Let a model forget the shift of positions by its last prompt's images, which it adds to those of any cache."""
    for part in model.modules():
        if "rope_deltas" in vars(part):
            part.rope_deltas = None


def cache_argument(decoder: Any) -> str:
    """The name under which a decoder takes its cache, one of CACHE_NAMES."""
    names = inspect.signature(type(decoder).forward).parameters
    return next((name for name in CACHE_NAMES if name in names), CACHE)


def take_cache(arguments: dict[str, Any]) -> Any | None:
    """Remove the cache from a pass's arguments, under any of its names, and return it; None without one."""
    caches = [arguments.pop(name, None) for name in CACHE_NAMES]
    return next((cache for cache in caches if cache is not None), None)


def without_renaming(function: Any) -> Any:
    """Return the function inside transformers' wrapper for older cache argument names."""
    while isinstance(function, types.FunctionType) and function.__code__ is _RENAMING:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def without_wrapper(model: Any) -> Any:
    """Return the model within the wrapper of ``torch.compile(model)``, which generates without it; else the model."""
    return vars(model).get("_modules", {}).get("_orig_mod", model)


def is_compiled(module: Any) -> bool:
    """Return True if torch.compile was applied to a module, or to its forward."""
    own = vars(module)
    if own.get("_compiled_call_impl") is not None or "_orig_mod" in own.get("_modules", {}):
        return True
    return hasattr(own.get("forward"), "_torchdynamo_orig_callable")


def own_cache_class(decoder: Any) -> type | None:
    """Return the class that a decoder's caches must have, or None if any will do."""
    parameter = inspect.signature(type(decoder).forward).parameters.get(cache_argument(decoder))
    hint = None if parameter is None else parameter.annotation
    # A string in some releases, else a class or a union with None.
    names = hint.split("|") if isinstance(hint, str) else []
    module = sys.modules[type(decoder).__module__]
    for found in [*(getattr(module, name.strip(), None) for name in names), *typing.get_args(hint), hint]:
        if isinstance(found, type) and issubclass(found, Cache) and found.__module__ == module.__name__:
            return found
    return None


def why_unknown_cache(decoder: Any) -> str | None:
    """Return a clause why a decoder accepts no cache of kvsieve, or None."""
    own = own_cache_class(decoder)
    if own is None:
        return None
    added = {name for name in vars(own) if not name.startswith("_") and not hasattr(Cache, name)}
    return f"it takes a cache of its own class only, {own.__name__}" if added - LINEAR_CACHE else None


def generate_arguments(model: Any) -> set[str]:
    """Return the argument names of ``model.generate``: its own, a GenerationConfig's, and the model's."""
    own = (
        inspect.signature(model.generate).parameters.keys()
        | vars(GenerationConfig()).keys()
        | vars(model.generation_config).keys()
    )
    passes = {**inspect.signature(model.prepare_inputs_for_generation).parameters}
    passes |= inspect.signature(model.forward).parameters
    more = {"tokenizer", "trust_remote_code"} | TransformersKwargs.__optional_keys__
    return (own | passes.keys() | more) - {"kwargs", "self"}


def rereads_at_border(model: Any) -> bool:
    """Return True if the model's generate drops its cache when its rotary tables change."""
    code = inspect.unwrap(type(model).prepare_inputs_for_generation).__code__
    return "original_max_position_embeddings" in code.co_names + code.co_consts


def prepared_config(model: Any, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """Return the configuration that ``model.generate(generation_config=config, **options)`` runs under, a copy."""
    found: GenerationConfig = model._prepare_generation_config(config, **options)[0]
    return found


def logits_processors(
    model: Any, config: GenerationConfig, input_ids: Tensor, own: Sequence[LogitsProcessor] = ()
) -> LogitsProcessorList:
    """Return generate's processors of the logits after a prompt.

    Args:
        model: of transformers.
        config: complete; see `prepared_config`. Not modified.
        input_ids: int64 [B, N], the prompt, without padding.
        own: further ones, which run after all but the sampling warpers.
    """
    config = copy.deepcopy(config)
    length = input_ids.shape[1]
    model._prepare_special_tokens(config, True, device=input_ids.device, batch_size=len(input_ids))
    # As generate does, which counts lengths from the beginning of the prompt.
    if config.max_new_tokens is not None:
        config.max_length = length + config.max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = length + config.min_new_tokens
    found: LogitsProcessorList = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=length,
        encoder_input_ids=input_ids,
        logits_processor=LogitsProcessorList(own),
        device=input_ids.device,
        model_kwargs={},
    )
    return found


def attention_of(config: Any) -> str | None:
    """Name of the attention implementation a config dispatches to."""
    return config._attn_implementation


def device_mesh(model: Any) -> Any | None:
    """Return the device mesh of a model divided by transformers, or None."""
    mesh = getattr(model, "_device_mesh", None)
    return None if mesh is None or mesh.size() == 1 else mesh


def tensor_parallel_mesh(model: Any) -> Any | None:
    """Return a one-dimensional device mesh of pure tensor parallelism, or None."""
    config = getattr(model.config, "distributed_config", None)
    mesh = device_mesh(model)
    if mesh is None or getattr(config, "tp_size", None) != mesh.size():
        return None
    return mesh if mesh.ndim == 1 else mesh["tp"]


def plain_cache_layers(config: Any) -> list[Any]:
    """Return the layers of transformers' own dynamic cache for this config, which show each layer's kind."""
    return DynamicCache(config=config).layers


def is_plain_mask(mask_function: Any) -> bool:
    """Return True if a mask function is causal, optionally with a sliding window or chunks, and nothing else."""
    parts = _mask_parts(mask_function)
    others = [getattr(part, "__qualname__", "") for part in parts if part is not causal_mask_function]
    return len(parts) - len(others) == 1 and len(others) < 2 and _LOCAL.issuperset(others)


def _mask_parts(mask_function: Any) -> list[Any]:
    """Return the functions that a mask function is the intersection of, without those that hide nothing."""
    name = getattr(mask_function, "__qualname__", "")
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if name.startswith("blockwise_overlay.") and all(
        isinstance(cell, Tensor) and bool((cell < 0).all()) for cell in cells
    ):
        # Blocks are images, and there is none.
        return []
    both = name.startswith("and_masks.")
    either = name.startswith("or_masks.")
    if not both and not either:
        return [mask_function]
    parts = [_mask_parts(part) for cell in cells for part in cell]
    if either and sum(bool(group) for group in parts) > 1:
        return [mask_function]
    return [part for group in parts for part in group]
