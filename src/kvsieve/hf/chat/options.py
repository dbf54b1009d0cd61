"""Options of generate in a chat."""

from __future__ import annotations

from typing import Any

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.generate.config import check_config, check_single_answer, config_in_effect
from kvsieve.hf.generate.drafted import taken_draft
from kvsieve.hf.generate.options import check_values, refusal
from kvsieve.planning.turns import stop_ids

_NOT_HERE = {
    "cache": "a chat has a cache of its own",
    "past_key_values": "a chat has a cache of its own",
    "input_ids": "a chat writes its prompt itself",
    "attention_mask": "a chat writes its prompt itself",
    "position_ids": "a chat counts on from what its cache has read",
    "token_type_ids": "a chat writes its prompt itself",
    "streamer": "use on_text= or stream()",
    "max_length": "use max_new_tokens=",
}


def complete_options(options: dict[str, Any], model: Any, tokenizer: Any, stops: frozenset[int]) -> frozenset[int]:
    """Fill in options for generate, and return the end tokens of this answer; stops: the default."""
    config = options.get("generation_config")
    if "eos_token_id" in options:
        ends = options["eos_token_id"]
        stops = frozenset([] if ends is None else ends if isinstance(ends, (list, tuple)) else [ends])
    else:
        if config is not None and config.eos_token_id is not None:
            stops = stop_ids(tokenizer, config.eos_token_id)
        options["eos_token_id"] = sorted(stops) or None
    if config is None:
        options.setdefault("do_sample", False)
    if all(source is None or source.pad_token_id is None for source in (config, model.generation_config)):
        pad = tokenizer.pad_token_id
        options.setdefault("pad_token_id", min(stops, default=0) if pad is None else pad)
    if options.get("stop_strings") is not None:
        options.setdefault("tokenizer", tokenizer)
    return stops


def check_chat_options(options: dict[str, Any], model: Any) -> None:
    """Raise for options of the chat or of the model's configuration that a chat does not support."""
    for name, instead in _NOT_HERE.items():
        if options.get(name) is not None:
            raise UnsupportedOptionError(f"{name}= is not for a chat: {instead}")
    new = options.get("max_new_tokens", 1)
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise InputError(f"max_new_tokens must be a number of tokens, at least 1, got {new!r}")
    check_values(options)
    _, options = taken_draft(model, options.get("draft"), {k: v for k, v in options.items() if k != "draft"})
    config = options.get("generation_config")
    if config is not None and config.max_length is not None and config.max_new_tokens is None:
        raise UnsupportedOptionError("generation_config.max_length is not for a chat: use max_new_tokens")
    check_single_answer(model, options, ", or use fork() and ask in each")
    try:
        config = config_in_effect(model, options)
    except Exception as error:  # of comparing an arbitrary value
        raise refusal(options, error) from error
    check_config(model, options, config)
