"""Support of plans by models, decided from the model object before anything is changed."""

from __future__ import annotations

import contextlib
from typing import Any

from kvsieve.errors import KvsieveError, PlanError, UnsupportedModelError
from kvsieve.hf.compat import decoder_of, layers_of, tensor_parallel_mesh, text_config, why_unknown_cache
from kvsieve.hf.kinds import LayerKind, growing_layers, layer_kinds
from kvsieve.hf.model.facts import Facts
from kvsieve.hf.model.latent import candidates
from kvsieve.hf.model.memory import shapes_of
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint
from kvsieve.planning.registry import list_methods, method_info
from kvsieve.planning.roles import ChunkedEvictor, Codec, Role, parts_of
from kvsieve.planning.settled import named_as

# Fields of a decoder's config that announce something attention would have to honour, and why it cannot yet.
_TELLING_FIELDS = {
    "index_topk": "its indexed attention selects the entries to read, in every layer",
    "rel_extent": "its attention adds a learned bias for each distance in every layer, unfit for a sieved cache",
}

# Architectures that only the name identifies; the guards at run time would catch them too, one pass later.
_TELLING_TYPES = {
    "diffllama": "its differential attention attends twice to each cached entry",
    "doge": "its dynamic masks are computed from cached values",
    "recurrent_gemma": "its recurrent layers keep state outside the cache",
}


def why_unsupported(model: Any, plan: Plan) -> str | None:
    """Return a clause why `plan` cannot run on `model`, or None."""
    reason = _why_no_plan_runs(model)
    if reason is not None:
        return reason
    kinds = layer_kinds(text_config(model))
    growing = growing_layers(kinds)
    if not growing and (plan.roles or not any(kind.entries != "none" for kind in kinds)):
        return f"{_mixture(kinds)}, so its cache is small already and nothing is left to do; run it without kvsieve"
    if plan.propagate is not None:
        plan.propagate.source(len(kinds))
        try:
            source = plan.propagate.first_layer(len(kinds), growing)
        except PlanError as error:
            return str(error)
        shared = [index for index, kind in enumerate(kinds) if kind.entries == "shared" and index > source]
        if shared and not (plan.propagate.two_pass or plan.drafts):
            return (
                f"token propagation from layer {source} would leave layer {shared[0]}, which shares the KV of layer "
                f"{kinds[shared[0]].source} as {len(shared)} of {len(kinds)} layers do with an earlier one's "
                f"({_numbers(shared)}), with queries for fewer tokens; use a plan without propagate=, such as 'snapkv'"
            )
    if isinstance(plan.evict, ChunkedEvictor) and len(growing) < len(kinds):
        return (
            f"{_mixture(kinds)}, and the plan reads its question again and again, which those layers cannot take "
            "back; use another method"
        )
    latent = [index for index, kind in enumerate(kinds) if kind.entries == "latent"]
    if latent and (reason := _why_not_latent(model, plan, latent)):
        return reason
    for codec in (plan.codec, plan.rest):
        if codec is not None and (reason := _why_not_encoded(model, codec)):
            return reason
    return None if plan.evict is None else Facts(model).why_missing(plan.evict.traits.needs, growing)


def _why_not_latent(model: Any, plan: Plan, layers: list[int]) -> str | None:
    """Return a clause why a plan cannot run on layers with latent attention, or None."""
    subject = f"its layer {layers[0]} has latent attention, of which only latents are stored,"
    if tensor_parallel_mesh(model) is not None:
        return f"{subject} and heads divided among processes would choose among them differently; run it on one process"
    if plan.read is not None:
        return f"{subject} and the plan reads sparsely; use a plan without read="
    if plan.prefill is not None:
        return f"{subject} and the plan chooses among the keys of heads; use a plan without prefill="
    for role in ("codec", "rest"):
        if (codec := vars(plan)[role]) is not None:
            name = type(codec).__name__
            return f"{subject} and {name} encodes the keys and values of heads; use a plan without {role}="
    needs = {"rotary": "the rotary embedding of its keys", "output_weight": "the output projection of each KV head"}
    for need in () if plan.evict is None else plan.evict.traits.needs:
        if need in needs:
            return f"{subject} and the plan needs {needs[need]}; use another method"
    if plan.evict is not None and plan.evict.traits.writes:
        return f"{subject} and {type(plan.evict).__name__} writes the keys and values of heads; use another method"
    rank = text_config(model).kv_lora_rank
    modules = list(layers_of(decoder_of(model)) or ())
    for index in layers:
        if not candidates(modules[index], rank):
            return (
                f"its layer {index} has latent attention, and no linear layer with plain weights is there to expand "
                f"latents of {rank} channels; load it without low-bit weights or adapters"
            )
    return None


def _why_not_encoded(model: Any, codec: Codec) -> str | None:
    """Return a clause why a codec does not support the heads of layers with growing KV, or None."""
    try:
        for dims in dict.fromkeys(shape.dims for shape in shapes_of(model) if shape.kind.grows):
            codec.keys(dims[0]).check(dims[0], "its keys")
            codec.values(dims[1]).check(dims[1], "its values")
    except KvsieveError as error:
        return f"{type(codec).__name__} cannot encode its entries: {error}"
    return None


def _mixture(kinds: tuple[LayerKind, ...]) -> str:
    """Say which layers hold no KV that grows."""
    others: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        if not kind.grows:
            others.setdefault(kind.words, []).append(index)
    parts = (f"{words} in {len(found)} of {len(kinds)} ({_numbers(found)})" for words, found in others.items())
    return f"its layers are not all full attention: {', '.join(parts)}"


def _numbers(indices: list[int]) -> str:
    """Write layer indices, the first few of many."""
    return ", ".join(map(str, indices[:4])) + (" ..." if len(indices) > 4 else "")


def _why_no_plan_runs(model: Any) -> str | None:
    """Return a clause why the model supports no plan, or None."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; kvsieve reduces the context of decoder-only models"
    if not hasattr(model, "generate") or not hasattr(model, "get_decoder"):
        return "it is not a causal language model; load it with AutoModelForCausalLM"
    config = text_config(model)
    if config.model_type in _TELLING_TYPES:
        return _TELLING_TYPES[config.model_type]
    for name, reason in _TELLING_FIELDS.items():
        if getattr(config, name, None):
            return f"{reason} ({name}={getattr(config, name)})"
    if not model._can_set_attn_implementation():
        return (
            "its attention does not go through transformers' AttentionInterface in any layer, so kvsieve cannot take "
            "its place; run it without kvsieve"
        )
    decoder = decoder_of(model)
    layers = layers_of(decoder)
    if decoder is model or layers is None:
        return "its decoder keeps its layers where kvsieve does not find them (no .layers, .h or .blocks)"
    try:
        kinds = layer_kinds(config)
    except UnsupportedModelError as error:
        return str(error)
    if len(kinds) != len(layers):
        return f"its {len(layers)} layers do not each have a cache of their own ({len(kinds)} cached)"
    return why_unknown_cache(decoder)


def _check_arrays(model: Any, plan: Plan) -> None:
    """Raise PlanError for a plan with arrays by layer and head that are not of the model's shape."""
    roles = [part for role in plan.roles for part in parts_of(vars(plan)[role])]
    roles = [role for role in roles if type(role).check_layer is not Role.check_layer]
    if not roles:
        return
    # Layers of unknown shapes are refused when they are prefilled.
    with contextlib.suppress(UnsupportedModelError):
        shapes = shapes_of(model)
        for index, shape in enumerate(shapes):
            for role in roles if shape.kind.entries == "growing" else ():
                role.check_layer(index, len(shapes), shape.heads, shape.query_heads, shape.dims[0])


def methods_for(model: Any) -> list[str]:
    """Return the names of the methods with a default plan that can run on `model`, without full KV."""
    found = []
    for info in (method_info(name) for name in list_methods() if name != "full"):
        # A plan that as it is by default does not fit the model's depth is refused with a PlanError.
        with contextlib.suppress(PlanError):
            if why_unsupported(model, info.make(**info.example)) is None:
                found.append(info.name)
    return found


def check_model(model: Any, plan: Plan) -> None:
    """Raise UnsupportedModelError, naming the model, the reason and the way out, unless `plan` can run on `model`.

    Raises PlanError for a plan with a profile of another model, or that skips layers it does not have.
    """
    reason = why_unsupported(model, plan)
    if reason is not None:
        others = ", ".join(methods_for(model))
        way_out = f"Methods that run on it: {others}." if others else "`kvsieve models` lists what is supported."
        raise UnsupportedModelError(f"{type(model).__name__} cannot run {plan.name!r}: {reason}. {way_out}")
    with named_as(plan.name):
        for role in plan.roles:
            vars(plan)[role].check(text_config(model).num_hidden_layers)
    _check_arrays(model, plan)
    found = Fingerprint.of(model) if plan.profile is not None else None
    if found is not None and plan.profile is not None and found != plan.profile:
        raise PlanError(
            f"{plan.name!r} uses a profile made for {plan.profile}, and this model is {found}: they differ in "
            f"{', '.join(plan.profile.differences(found))}; make one for it with `kvsieve calibrate MODEL --out FILE`"
        )
