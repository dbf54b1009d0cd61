"""Which models a plan can run on, decided from the model object before anything is changed."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.compat import DynamicLayer, DynamicSlidingWindowLayer, plain_cache_layers, text_config
from kvsieve.hf.model.facts import Facts
from kvsieve.plans import Plan
from kvsieve.profiles import Fingerprint
from kvsieve.registry import list_methods, method_info

# Fields of a decoder's config that announce something attention would have to honour, and why it cannot yet.
_TELLING_FIELDS = {
    "kv_lora_rank": "its latent attention transforms keys and values after they are cached",
    "attention_chunk_size": "its chunked attention lets layers see different parts of the prompt",
    "num_kv_shared_layers": "its layers share keys and values with each other",
    "index_topk": "its indexed attention chooses what to read by itself",
}

# Architectures that can be told only by name; the guards at run time would catch them too, one pass later.
_TELLING_TYPES = {
    "diffllama": "its differential attention attends twice to what is cached once",
    "doge": "its dynamic masks are computed from cached values",
    "jetmoe": "its attention repeats keys and values after they are cached",
    "recurrent_gemma": "its recurrent layers keep state outside the cache",
}


def why_unsupported(model: Any, plan: Plan) -> str | None:
    """One clause saying why `plan` cannot run on `model`, or None when it can."""
    reason = _why_no_plan_runs(model)
    if reason is not None:
        return reason
    layers, kinds = model.get_decoder().layers, plain_cache_layers(text_config(model))
    sliding = [index for index, kind in enumerate(kinds) if isinstance(kind, DynamicSlidingWindowLayer)]
    if plan.roles and len(sliding) == len(kinds):
        return "all its layers use sliding-window attention, so their cache is small already and nothing is left to do"
    if plan.propagate is not None:
        source = plan.propagate.source(len(kinds))
        crossed = [index for index in sliding if index >= source]
        if crossed:
            return (
                f"token propagation from layer {source} cannot cross its sliding-window layers (layer {crossed[0]} is "
                "one); use a plan without propagate="
            )
        if "position_embeddings" not in inspect.signature(layers[0].forward).parameters:
            return "its layers take no position_embeddings, so token propagation cannot move positions along"
    full = [index for index in range(len(kinds)) if index not in sliding]
    return None if plan.evict is None else Facts(model).why_missing(plan.evict.traits.needs, full)


def _why_no_plan_runs(model: Any) -> str | None:
    """One clause about the model alone, or None when plans can run on it."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; kvsieve reduces the context of decoder-only models"
    if not hasattr(model, "generate") or not hasattr(model, "get_decoder"):
        return "it is not a causal language model; load it with AutoModelForCausalLM"
    config = text_config(model)
    if config is not model.config:
        return "it is a multimodal model; kvsieve runs text-only language models so far"
    if config.model_type in _TELLING_TYPES:
        return _TELLING_TYPES[config.model_type]
    for name, reason in _TELLING_FIELDS.items():
        if getattr(config, name, None):
            return f"{reason} ({name}={getattr(config, name)})"
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' AttentionInterface"
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if decoder is model or layers is None:
        return "its decoder keeps its layers where kvsieve does not find them (no .layers)"
    kinds = plain_cache_layers(config)
    for kind in kinds:
        if type(kind) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"it has layers that are not plain attention ({type(kind).__name__}: linear, shared or indexed)"
    if len(kinds) != len(layers):
        return f"its {len(layers)} layers do not each have a cache of their own ({len(kinds)} cached)"
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        # transformers' own attention runs there, which leaves both out.
        capped = getattr(config, "attn_logit_softcapping", None)
        if isinstance(kind, DynamicSlidingWindowLayer) and (capped or _has_sinks(layer)):
            what = f"capped logits (attn_logit_softcapping={capped})" if capped else "learned sinks"
            return f"its sliding-window layers (layer {index} is one) have {what}, which kvsieve does not support yet"
    return None


def methods_for(model: Any) -> list[str]:
    """Names of the methods whose plan, as it is by default, can run on `model`; full KV is not counted."""
    found = []
    for info in (method_info(name) for name in list_methods() if name != "full"):
        # A plan that as it is by default does not fit the model's depth is refused with a PlanError.
        with contextlib.suppress(PlanError):
            if why_unsupported(model, info.make(**info.example)) is None:
                found.append(info.name)
    return found


def check_model(model: Any, plan: Plan) -> None:
    """Raise UnsupportedModelError, naming the model, the reason and the way out, unless `plan` can run on `model`.

    Raises PlanError for a plan whose profile was made for another model, or that skips layers it does not have.
    """
    reason = why_unsupported(model, plan)
    if reason is not None:
        others = ", ".join(methods_for(model))
        way_out = f"Methods that run on it: {others}." if others else "`kvsieve models` lists what is supported."
        raise UnsupportedModelError(f"{type(model).__name__} cannot run {plan.name!r}: {reason}. {way_out}")
    if plan.evict is not None:
        plan.evict.check(len(model.get_decoder().layers))
    found = Fingerprint.of(model) if plan.profile is not None else None
    if found is not None and plan.profile is not None and found != plan.profile:
        raise PlanError(
            f"{plan.name!r} uses a profile made for {plan.profile}, and this model is {found}: they differ in "
            f"{', '.join(plan.profile.differences(found))}; make one for it with `kvsieve calibrate MODEL --out FILE`"
        )


def _has_sinks(layer: Any) -> bool:
    return any(name.rpartition(".")[2] == "sinks" for name, _ in layer.named_parameters())
