"""Checks of the options of ``model.generate``, before prefill."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvsieve.errors import InputError, UnsupportedOptionError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import generate_arguments
from kvsieve.hf.generate.config import check_config, config_in_effect, who_says
from kvsieve.hf.inputs import check_callable
from kvsieve.hf.prompt.checks import check_chunk
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.suggestions import did_you_mean

# Arguments of generate that a plan cannot honour; attributes of a configuration are in config.py.
_REFUSED = {
    "past_key_values": "pass it as cache=",
    "custom_generate": "the plan could not tell whether it ran",
    "inputs": "pass the prompt as input_ids",
    "inputs_embeds": "pass the prompt as input_ids",
}
# Options that are numbers, and the least each may be.
_NUMBERS = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "max_length": 1,
    "min_length": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "pad_token_id": 0,
}


def check_values(options: Mapping[str, Any]) -> None:
    """Raise InputError for options of ``model.generate`` of a wrong kind, if kvsieve uses them."""
    for name, least in _NUMBERS.items():
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise InputError(f"generate({name}=...) must be a whole number of at least {least}, got {short(value)}")
    for name, kind in (("stopping_criteria", "StoppingCriteria"), ("logits_processor", "LogitsProcessor")):
        parts = options.get(name)
        if parts is not None and not (isinstance(parts, (list, tuple)) and all(map(callable, parts))):
            raise InputError(f"generate({name}=...) must be a list of {kind} objects, got {short(parts)}")
    check_callable("generate(prefix_allowed_tokens_fn=...)", options.get("prefix_allowed_tokens_fn"))
    for name in ("put", "end"):
        if options.get("streamer") is not None and not callable(getattr(options["streamer"], name, None)):
            raise InputError(f"generate(streamer=...) must have put() and end(), got {short(options['streamer'])}")
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if options.get("synced_gpus") and not grouped:
        raise InputError(
            "generate(synced_gpus=True) is for several processes, and no process group is there; leave it out"
        )
    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InputError(f"generate(generation_config=...) must be a GenerationConfig, got {short(config)}")


def checked_config(model: Any, options: Mapping[str, Any]) -> GenerationConfig:
    """Return the configuration in effect.

    Raises InputError for a value of the wrong kind, UnsupportedOptionError for an unknown option, or one that a plan
    does not support.
    """
    for name, reason in _REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise UnsupportedOptionError(f"generate({name}=...) is not supported under a plan: {reason}")
    check_values(options)
    known = generate_arguments(model)
    for name, value in options.items():
        if value is not None and name not in known:
            raise UnsupportedOptionError(f"generate has no option {name!r}{did_you_mean(name, sorted(known), None)}")
    try:
        config = config_in_effect(model, options)
    except Exception as error:  # of comparing an arbitrary value
        raise refusal(options, error) from error
    check_config(model, options, config)
    return config


def check_plan_can(
    model: AttachedModel,
    input_ids: Tensor,
    cache: SieveCache,
    reading: ReadOptions,
    options: Mapping[str, Any],
    config: GenerationConfig,
) -> None:
    """Raise UnsupportedOptionError for options that the plan, or the prefill of this prompt, does not support.

    Args:
        model: the attached model.
        input_ids: int64 [B, N], the whole conversation.
        cache: to continue.
        reading: options of the prefill.
        options: of generate.
        config: in effect for them.
    """
    _check_per_token(model, input_ids, cache, reading, options)
    plan = model.plan
    said = functools.partial(who_says, model.model, options)
    of_its_own = plan.shortens_prompt or plan.probes or plan.drafts
    if config.guidance_scale not in (None, 1) and of_its_own:
        raise UnsupportedOptionError(
            f"{said('guidance_scale')} runs the model on a second prompt in plain calls, and {plan.name!r} reads "
            "prompts in steps of its own: take another method, or guidance_scale=1"
        )
    if not (config.output_hidden_states and config.return_dict_in_generate and isinstance(input_ids, Tensor)):
        return
    model.check_cache(cache)
    check_chunk(reading.chunk)
    new = input_ids.shape[-1] - cache.conversation.caller_length_and_mask()[0]
    why = None
    if of_its_own:
        why = f"{plan.name!r} reads prompts in steps of its own: take another method"
    elif reading.constraints.question_tokens:
        why = "question_tokens= has it read in two: leave that out"
    elif reading.chunk is not None and new > reading.chunk:
        why = f"chunk={reading.chunk} is below its {new} tokens: raise that or leave it out"
    if why is not None:
        raise UnsupportedOptionError(
            f"{said('output_hidden_states')} gives the hidden states of a prompt that is read in one pass, and {why}, "
            "or pass output_hidden_states=False"
        )


def _check_per_token(
    model: AttachedModel, input_ids: Tensor, cache: SieveCache, reading: ReadOptions, options: Mapping[str, Any]
) -> None:
    """Raise UnsupportedOptionError for per-token arguments, if generate does not prefill the whole prompt.

    Args:
        model: the attached model.
        input_ids: int64 [B, N].
        cache: to continue.
        reading: options of the prefill.
        options: of generate.
    """
    alone = reading.chunk is not None or reading.constraints.question_tokens is not None
    plan = model.plan
    evictor = model.plan.evict
    turns = evictor is not None and "rotary" in evictor.traits.needs
    if not isinstance(input_ids, Tensor) or not (alone or plan.probes or plan.drafts or turns):
        return
    for name, value in options.items():
        # The prompt of guidance is another one, of any length.
        if isinstance(value, Tensor) and value.shape[-2:] == input_ids.shape and not name.startswith("negative_"):
            # Dropping arguments about images would not help a prompt with images.
            model.check_cache(cache)
            model.check_tokens(cache, input_ids.shape[1], input_ids)
            raise UnsupportedOptionError(
                f"generate({name}=...) is about every token of a prompt that generate reads in one pass: leave it out, "
                f"or leave chunk= and question_tokens= out, and take a method that reads and moves nothing by itself "
                f"where {plan.name!r} does"
            )


def refusal(options: Mapping[str, Any], error: Exception) -> InputError:
    text = ", ".join(f"{name}={short(value, 30)}" for name, value in options.items())
    return InputError(f"generate cannot use its options ({text}): {short(str(error), 400)}")
