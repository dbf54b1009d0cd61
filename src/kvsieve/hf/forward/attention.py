"""Attention and mask functions called by transformers while a plan is attached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache import LayerMemory
from kvsieve.errors import CacheStateError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.latent import LatentLayer
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.cache.states import CacheLayer
from kvsieve.hf.compat import AttentionInterface, AttentionMaskInterface, causal_mask_function, is_plain_mask, sdpa_mask
from kvsieve.hf.forward.latent import ask_latents
from kvsieve.hf.forward.passes import current
from kvsieve.hf.forward.pieces import attend_by_chunk
from kvsieve.hf.forward.rows import RowsSession
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.shared_kv import attend_shared
from kvsieve.kernels.cpu import cores
from kvsieve.types import AttentionQueries

# transformers tests implementation names for substrings: none of flash, sdpa, flex, paged or "/" may occur in it.
NAME = "kvsieve"

# Arguments of an attention function that do not change a causal layer's result in inference.
_HARMLESS = frozenset({"dropout", "position_ids", "logits_to_keep"})
# Arguments of AttentionQueries.
_TAKEN = frozenset({"softcap", "s_aux"})


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as attention modules do while attached; signature of transformers' AttentionInterface."""
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            "the model, or a part of it, was compiled with torch.compile, where a plan cannot act: "
            "attach to the model as it was loaded"
        )
    session = current()
    if session is None:
        raise CacheStateError(f"{type(module).__name__} ran outside its decoder while kvsieve is attached to the model")
    arguments = attention_mask, scaling, kwargs
    if query.is_cpu:
        cores.look()
    if isinstance(session, RowsSession):
        parts = session.each(query, key, value)
        out = session.joined(
            [_attend(row, module, (one, keys, values), *arguments) for row, one, keys, values in parts]
        )
    else:
        out = _attend(session, module, (query, key, value), *arguments)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    session: Session,
    module: torch.nn.Module,
    given: tuple[Tensor, Tensor, Tensor],
    attention_mask: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attend within a session: [B, Hq, L, Dv]. given: queries, keys and values."""
    query, key, value = given
    kwargs = dict(kwargs)
    cache = session.cache
    index, layer = _layer_of(cache, module)
    who = f"layer {index} ({type(module).__name__})"
    own = layer if layer.source is None else cache.all_layers[layer.source]
    if own.window is not None and kwargs.get("sliding_window") == own.window.span:
        del kwargs["sliding_window"]
    for name, extra in kwargs.items():
        # Other arguments of attention (biases, indices ...) would change its result and cannot be dropped;
        # flags and objects, such as generate's tokenizer, only pass through.
        telling = isinstance(extra, (Tensor, int, float, list, tuple)) and not isinstance(extra, bool)
        if telling and name not in _HARMLESS | _TAKEN:
            raise UnsupportedModelError(f"{who} attends with {name}=, which kvsieve does not support yet")
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"{who} attends to later tokens; kvsieve supports causal attention only")
    if attention_mask is not None:
        raise UnsupportedOptionError(
            f"{who} was given a custom attention mask, such as one that lets an image's tokens see each other both "
            "ways; only padding masks are supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    _check_sinks(who, query, sinks)
    asked = AttentionQueries(query, scale, softcap, None if sinks is None else sinks.detach())
    if isinstance(layer, LatentLayer):
        if torch.is_autocast_enabled(query.device.type):
            raise UnsupportedOptionError(
                f"{who} has latent attention, which does not run under torch.autocast: load the model in that dtype"
            )
        prompt = session.step.phase == "prefill"
        out = session.attend(index, layer, *ask_latents(asked, layer, module, key, value, who, prompt=prompt))
    elif isinstance(layer, StoreLayer):
        key, value, repeats = layer.take(key, value, who)
        asked, key, value = _one_dtype(asked, key, value)
        _check_dtype(layer.store, key)
        out = attend_by_chunk(session, index, layer, _heads_together(asked, repeats), key, value)
        out = out if repeats == 1 else out.unflatten(1, (-1, repeats)).transpose(1, 2).flatten(1, 2)
    elif layer.source is not None:
        out = attend_shared(session, index, layer.source, asked, key)
    else:
        raise UnsupportedModelError(f"{who} attends, and its cache has no entries for it: this is not supported")
    return out


def _one_dtype(asked: AttentionQueries, key: Tensor, value: Tensor) -> tuple[AttentionQueries, Tensor, Tensor]:
    """Cast queries, keys and values to autocast's dtype if theirs differ, as torch's own attention does."""
    kind = key.device.type
    if asked.query.dtype == key.dtype == value.dtype or not torch.is_autocast_enabled(kind):
        return asked, key, value
    dtype = torch.get_autocast_dtype(kind)
    return replace(asked, query=asked.query.to(dtype)), key.to(dtype), value.to(dtype)


def _check_dtype(store: LayerMemory, key: Tensor) -> None:
    """Raise CacheStateError if new keys have another dtype than stored ones."""
    if not store.is_empty and store.dtype != key.dtype:
        raise CacheStateError(
            f"the cache holds keys in {store.dtype}, and this pass makes them in {key.dtype}: go on with "
            "it under torch.autocast where it was begun under it, and without where it was not, or start a new cache"
        )


def _layer_of(cache: SieveCache, module: torch.nn.Module) -> tuple[int, CacheLayer]:
    """Return the attending layer, found by its staged keys, or by its module's index if it has none."""
    layer: Any = cache.layers[cache.updated]
    if isinstance(layer, StoreLayer) and layer.staged is not None:
        return cache.updated, layer
    index: int = module.layer_idx  # type: ignore[assignment]
    return index, cache.layers[index]  # type: ignore[return-value]


def _heads_together(asked: AttentionQueries, repeats: int) -> AttentionQueries:
    """Reorder query heads so that those of a KV head are adjacent, if the model repeats all KV heads in turn."""
    if repeats == 1:
        return asked
    if asked.sinks is not None:
        raise UnsupportedModelError("its KV heads are repeated in turn, and it has learned sinks: not supported")
    return replace(asked, query=asked.query.unflatten(1, (repeats, -1)).transpose(1, 2).flatten(1, 2))


def _check_sinks(who: str, query: Tensor, sinks: Tensor | None) -> None:
    """Raise UnsupportedModelError unless there are no sinks, or one for each query head."""
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise UnsupportedModelError(
            f"{who} attends with s_aux= of shape {tuple(sinks.shape)}; kvsieve supports one sink for each of its "
            f"{query.shape[1]} query heads"
        )


def mask_function(*, mask_function: Any = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Return None for causal, window and chunk layers: the session knows padding and positions.

    Any other mask is built, and refused in the layer that gets it.
    """
    if is_plain_mask(mask_function):
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(mask_function=mask_function, **kwargs)


def register() -> None:
    """Register the implementation with transformers. Without the mask half, padding would be dropped silently.

    An existing registration stays: a profiler may have wrapped it.
    """
    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
