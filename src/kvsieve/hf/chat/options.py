"""The options of generate, where a chat gives them."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.generate.options import check_values
from kvsieve.turns import stop_ids

_NOT_HERE = {
    "cache": "a chat has a cache of its own",
    "past_key_values": "a chat has a cache of its own",
    "input_ids": "a chat writes its prompt itself",
    "attention_mask": "a chat writes its prompt itself",
    "streamer": "use on_text= or stream()",
    "max_length": "use max_new_tokens=",
}


def complete_options(options: dict[str, Any], model: Any, tokenizer: Any, stops: frozenset[int]) -> frozenset[int]:
    """Fill in what generate needs to know, and return the tokens that end this answer; stops: where nothing says so."""
    config = options.get("generation_config")
    if "eos_token_id" in options:
        ends = options["eos_token_id"]
        stops = frozenset([] if ends is None else ends if isinstance(ends, (list, tuple)) else [ends])
    else:
        stops = stops if config is None else stop_ids(tokenizer, config.eos_token_id)
        options["eos_token_id"] = sorted(stops) or None
    if config is None:
        options.setdefault("do_sample", False)
    if getattr(config or model.generation_config, "pad_token_id", None) is None:
        pad = tokenizer.pad_token_id
        options.setdefault("pad_token_id", min(stops, default=0) if pad is None else pad)
    if options.get("stop_strings") is not None:
        options.setdefault("tokenizer", tokenizer)
    return stops


def check_chat_options(options: dict[str, Any], own: GenerationConfig) -> None:
    """Raise for options that a chat cannot honour; own: the model's configuration of generate."""
    for name, instead in _NOT_HERE.items():
        if options.get(name) is not None:
            raise UnsupportedOptionError(f"{name}= is not for a chat: {instead}")
    new = options.get("max_new_tokens", 1)
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise InputError(f"max_new_tokens must be a number of tokens, at least 1, got {new!r}")
    check_values(options)
    config = options.get("generation_config") or own
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name, getattr(config, name, None)) or 1) > 1:
            raise UnsupportedOptionError(
                f"{name}={options.get(name, getattr(config, name, None))} gives a chat several answers to go on "
                f"from; pass {name}=1, or use fork() and ask in each"
            )
