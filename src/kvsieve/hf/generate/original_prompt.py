"""Callbacks of generate's caller see the original prompt, even if the model gets a shorter one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StopStringCriteria

from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.compat import logits_processors
from kvsieve.hf.generate.options import refusal

# Rules of a configuration that look at the tokens of the prompt, and the values with which they do nothing.
_OF_PROMPTS = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    # Sequences that may begin in the prompt.
    "sequence_bias": None,
    "bad_words_ids": None,
    "watermarking_config": None,
}


class OriginalPrompt:
    """Shows the original prompt to callbacks of generate's caller, if the model gets a shorter one.

    Attributes:
        input_ids: [B, N] as given.
        read: columns of the shorter prompt.
    """

    def __init__(self, input_ids: Tensor, read: int) -> None:
        self.input_ids = input_ids
        self.read = read

    def whole(self, ids: Tensor) -> Tensor:
        """Replace the short prompt by the original: ids [B * copies, read + new] -> [B * copies, N + new]."""
        prompts = self.input_ids.to(ids.device).repeat_interleave(len(ids) // len(self.input_ids), 0)
        return torch.cat([prompts, ids[:, self.read :]], 1)

    def options(self, options: dict[str, Any], *configs: Any) -> dict[str, Any]:
        """Convert generate's options to the short prompt; configs: sources of lengths that are not given.

        Raises UnsupportedOptionError for per-token arguments.
        """
        options = dict(options)
        for name, value in options.items():
            if isinstance(value, Tensor) and value.shape[:2] == self.input_ids.shape:
                raise UnsupportedOptionError(
                    f"generate({name}=...) is about every token given, of which only some are read again; leave it out"
                )
        for name, instead in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
            length = _asked(name, options, configs)
            if length and _asked(instead, options, configs) is None:
                options[name] = max(length - self.input_ids.shape[1] + self.read, 1)
        if options.get("logits_processor"):
            options["logits_processor"] = [_Processor(processor, self) for processor in options["logits_processor"]]
        allowed = options.get("prefix_allowed_tokens_fn")
        if allowed is not None:
            options["prefix_allowed_tokens_fn"] = lambda row, ids: allowed(
                row, torch.cat([self.input_ids[row].to(ids.device), ids[self.read :]])
            )
        return options

    def rules(self, options: dict[str, Any], model: Any, config: GenerationConfig) -> dict[str, Any]:
        """Apply rules about the prompt's tokens to the original: return options of generate, with these as processors.

        Args:
            options: of generate.
            model: of transformers.
            config: in effect for them.
        """
        wanted = {name: getattr(config, name) for name in _OF_PROMPTS}
        if all(value in (None, _OF_PROMPTS[name]) for name, value in wanted.items()):
            return options
        # Of end tokens, which generate takes out of the bad words.
        rules = logits_processors(model, GenerationConfig(**wanted, eos_token_id=config.eos_token_id), self.input_ids)
        return {**options, **_OF_PROMPTS, "logits_processor": [*(options.get("logits_processor") or []), *rules]}

    def criteria(
        self, criteria: list[Any], options: dict[str, Any], config: GenerationConfig
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return stopping criteria that see the original prompt, and options of generate without stop strings.

        Args:
            criteria: of the caller.
            options: of generate.
            config: in effect for them.
        """
        tokenizer = options.get("tokenizer")
        # Without a tokenizer generate refuses stop strings.
        if config.stop_strings is not None and tokenizer is not None:
            # One may begin in the prompt.
            try:
                stops = StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings)
            except Exception as error:  # of a tokenizer that it cannot read
                raise refusal(options, error) from error
            criteria = [*criteria, stops]
            options = {**options, "stop_strings": None}
        return [_Criterion(criterion, self) for criterion in criteria], options

    def output(self, output: Any) -> Any:
        """Return generate's result, with sequences that begin with the original prompt."""
        if isinstance(output, Tensor):
            return self.whole(output)
        output.sequences = self.whole(output.sequences)
        return output


def _asked(name: str, options: dict[str, Any], configs: tuple[Any, ...]) -> Any:
    values = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


class _Criterion(StoppingCriteria):
    def __init__(self, inner: Any, shown: OriginalPrompt) -> None:
        self.inner = inner
        self.shown = shown

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.inner(self.shown.whole(input_ids), scores, **kwargs)


class _Processor(LogitsProcessor):
    def __init__(self, inner: Any, shown: OriginalPrompt) -> None:
        self.inner = inner
        self.shown = shown

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        out: Tensor = self.inner(self.shown.whole(input_ids), scores)
        return out


class Streamer:
    """Forwards generate's stream to a streamer of its caller.

    Attributes:
        inner: the streamer, or None.
        shown: shows it the original prompt, which generate puts first; None if the prompt is unchanged.
        raised: the error that it raised; None for none.
    """

    def __init__(self, inner: Any, shown: OriginalPrompt | None) -> None:
        self.inner = inner
        self.shown = shown
        self.raised: Exception | None = None
        self._begun = False

    def put(self, value: Tensor) -> None:
        shown = None if self._begun else self.shown
        self._call(self.inner.put, value if shown is None else shown.whole(value))
        self._begun = True

    def end(self) -> None:
        self._call(self.inner.end)

    def _call(self, method: Any, *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:
            self.raised = error
            raise
