"""The attention and mask functions that transformers calls while a plan is attached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.compat import (
    AttentionInterface,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_attention,
    sdpa_mask,
)
from kvsieve.hf.forward.passes import current
from kvsieve.hf.forward.request import Asked
from kvsieve.types import AttentionTerms

# transformers tests implementation names for substrings: none of flash, sdpa, flex, paged or "/" may occur in it.
NAME = "kvsieve"

# Arguments of an attention function that do not change a causal layer's result in inference.
_HARMLESS = frozenset({"dropout", "position_ids"})
# Arguments that AttentionTerms are made of.
_TERMS = frozenset({"softcap", "s_aux"})


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
    session = current()
    if session is None:
        raise CacheStateError(f"{type(module).__name__} ran outside its decoder while kvsieve is attached to the model")
    index: int = module.layer_idx  # type: ignore[assignment]
    layer = session.cache.layers[index]
    if not isinstance(layer, SieveLayer):
        if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
            # torch's attention would leave them out.
            raise UnsupportedModelError(
                f"layer {index} ({type(module).__name__}) attends within a sliding window with capped logits or "
                "learned sinks, which kvsieve does not support yet"
            )
        return sdpa_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    who = f"layer {index} ({type(module).__name__})"
    for name, given in kwargs.items():
        # Whatever else attention is told (biases, indices ...) would change its result and cannot be dropped;
        # flags and objects, such as generate's tokenizer, only pass through.
        telling = isinstance(given, (Tensor, int, float, list, tuple)) and not isinstance(given, bool)
        if telling and name not in _HARMLESS | _TERMS:
            raise UnsupportedModelError(f"{who} attends with {name}=, which kvsieve does not support yet")
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"{who} attends to later tokens; kvsieve supports causal attention only")
    if attention_mask is not None:
        raise UnsupportedOptionError(f"{who} was given a custom attention mask; only padding masks are supported")
    key, value = layer.take(key, value, who)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = Asked(query, scale, _terms(who, query, kwargs.get("softcap"), kwargs.get("s_aux")))
    out = session.attend(index, layer, asked, key, value)
    return out.transpose(1, 2).contiguous(), None


def _terms(who: str, query: Tensor, softcap: float | None, sinks: Tensor | None) -> AttentionTerms | None:
    """Terms that the attention function was given; None where there are none."""
    if softcap is None and sinks is None:
        return None
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise UnsupportedModelError(
            f"{who} attends with s_aux= of shape {tuple(sinks.shape)}; kvsieve supports one sink for each of its "
            f"{query.shape[1]} query heads"
        )
    return AttentionTerms(softcap, None if sinks is None else sinks.detach())


def mask_function(*, mask_function: Any = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Plain causal layers need no mask (the session knows the padding); sliding-window layers get transformers' own."""
    if mask_function is causal_mask_function:
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(mask_function=mask_function, **kwargs)


def register() -> None:
    """Make the implementation known to transformers. Without the mask half, padding would be dropped silently."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
