"""The configuration of an answer, from the call and the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from kvsieve.errors import UnsupportedOptionError, short
from kvsieve.hf.compat import logits_processors, prepared_config

_ASSISTED = "drafts are asked for with draft='lookup', or a smaller model"
# Attributes of a GenerationConfig that a plan cannot honour, and why.
REFUSED = {
    "prompt_lookup_num_tokens": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "use_mtp": _ASSISTED,
    "cache_implementation": "the plan brings its own cache",
    "prefill_chunk_size": "kvsieve chunks the prompt itself: use chunk=",
    "output_attentions": "attention weights are never formed",
    "token_healing": "it changes the prompt, which is read before",
}
# Attributes by which generate takes a way of decoding that it has no code for any more, by its name of that way.
FROM_HUB = {
    "contrastive_search": ("penalty_alpha",),
    "group_beam_search": ("num_beam_groups",),
    "constrained_beam_search": ("constraints", "force_words_ids"),
    "dola_generation": ("dola_layers",),
}
# Values of cache_implementation that a plan satisfies in any case.
GROWING = ("dynamic", "hybrid")


def config_in_effect(model: Any, options: Mapping[str, Any] | None = None) -> GenerationConfig:
    """Return the complete configuration of ``model.generate(**options)``, as transformers builds it.

    Precedence: an option of the call, its `generation_config`, ``model.generation_config``, transformers' defaults.

    Args:
        model: of transformers.
        options: of the call; None for none.
    """
    options = dict(options or {})
    return prepared_config(model, options.pop("generation_config", None), options)


def who_says(model: Any, options: Mapping[str, Any], name: str) -> str:
    """Return the source of an attribute of the configuration, such as "generate(num_beams=...)"."""
    if options.get(name) is not None:
        return f"generate({name}=...)"
    for where, config in (("", options.get("generation_config")), ("model.", model.generation_config)):
        value = getattr(config, name, None)
        if value is not None:
            return f"{where}generation_config.{name}={short(value, 40)}"
    return name


def check_config(model: Any, options: Mapping[str, Any], config: GenerationConfig) -> None:
    """Raise UnsupportedOptionError for attributes of a configuration that a plan does not support.

    Args:
        model: of transformers.
        options: of the call.
        config: in effect for it.
    """
    for name, reason in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and not (name == "cache_implementation" and value in GROWING):
            raise UnsupportedOptionError(
                f"{who_says(model, options, name)} is not supported under a plan: {reason}{_way_out(options, name)}"
            )
    mode = config.get_generation_mode().value
    for name in FROM_HUB.get(mode, ()):
        if getattr(config, name, None) is not None:
            raise UnsupportedOptionError(
                f"{who_says(model, options, name)} is not supported under a plan: generate takes code from the hub for "
                f"it ({mode}), on which the plan could not run{_way_out(options, name)}"
            )
    if config.use_cache is False:
        raise UnsupportedOptionError(
            f"{who_says(model, options, 'use_cache').replace('...', 'False')} leaves nothing to reduce; leave it "
            f"unset{_way_out(options, 'use_cache', True)}"
        )


def _way_out(options: Mapping[str, Any], name: str, value: Any = None) -> str:
    """Return advice on how a call overrides a configuration; "" if the call itself sets it."""
    return "" if options.get(name) is not None else f", or pass {name}={value} in the call"


def check_single_answer(model: Any, options: Mapping[str, Any], otherwise: str = "", *, beams: bool = False) -> None:
    """Raise UnsupportedOptionError for several answers, and for beams, if one answer and its cache are needed.

    Call it before `config_in_effect`, which fails for several answers without sampling.

    Args:
        model: of transformers.
        options: of the call.
        otherwise: advice for several answers.
        beams: accept beams, if the cache is not continued.
    """
    config = options.get("generation_config")
    for name in ("num_return_sequences",) if beams else ("num_beams", "num_return_sequences"):
        inherited = getattr(model.generation_config if getattr(config, name, None) is None else config, name, None)
        value = options.get(name, inherited)
        if isinstance(value, int) and value > 1:
            said = who_says(model, options, name).replace("...", str(value))
            raise UnsupportedOptionError(f"{said} gives several answers where one is taken; pass {name}=1{otherwise}")


def padding_token(config: GenerationConfig) -> int | None:
    """Return the token that generate treats as padding in ids without a mask, or None."""
    pad = config.pad_token_id
    return None if pad is None or pad in end_tokens(config) else int(pad)


def end_tokens(config: GenerationConfig) -> list[int]:
    """Return the tokens that end an answer."""
    ends = config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


def processors_of(
    model: Any, config: GenerationConfig, input_ids: Tensor, own: Sequence[LogitsProcessor] = ()
) -> LogitsProcessorList:
    """Return generate's processors of the logits after a prompt, sampling warpers last.

    For other loops that answer as generate does: suppressed, forced and bad words, penalties, n-grams, minimum lengths,
    temperature and so on. Call it with ids [B, N + new] and float scores [B, V].

    Args:
        model: of transformers.
        config: in effect.
        input_ids: int64 [B, N], the prompt, without padding.
        own: see `logits_processors`.

    Raises:
        UnsupportedOptionError: `guidance_scale`, which runs the model on a second prompt.
    """
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise UnsupportedOptionError(
            f"{who_says(model, {}, 'guidance_scale')} runs the model on a second prompt, which only sieve.generate "
            "and model.generate do: set it to None"
        )
    return logits_processors(model, config, input_ids, own)
