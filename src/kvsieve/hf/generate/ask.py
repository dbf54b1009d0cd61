"""Prompts from texts and chats, and the options for an answer as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError, short
from kvsieve.planning.turns import prompt_ids, stop_ids

Prompt = str | Sequence[Mapping[str, Any]]
_DEFAULTS = {"max_new_tokens": 256, "chunk": 1024, "do_sample": False}


def asked(sieve: Any, prompt: Prompt, question: str | None, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return the ids int64 [1, N] of a prompt and its options of `generate`; see Sieve.ask."""
    if sieve.tokenizer is None:
        raise InputError("ask needs the tokenizer: kvsieve.attach(model, plan, tokenizer=tokenizer)")
    ids = torch.tensor([prompt_ids(sieve.tokenizer, _messages(prompt, question))], device=sieve.model.device)
    ends = stop_ids(sieve.tokenizer, sieve.model.generation_config.eos_token_id)
    filler = sieve.tokenizer.pad_token_id or 0
    return ids, {**_DEFAULTS, "eos_token_id": sorted(ends) or None, "pad_token_id": filler, **options}


def _messages(prompt: Any, question: str | None) -> list[dict[str, Any]]:
    """Return the chat with the question after its last message. Raises InputError."""
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        messages = [dict(message) for message in prompt]
    else:
        raise InputError(
            f'ask takes a text, or messages such as [{{"role": "user", "content": "..."}}], got {short(prompt)}; for '
            "token ids there is sieve.generate"
        )
    if question is not None:
        last = messages[-1].get("content")
        if not isinstance(last, str) or messages[-1].get("role") != "user":
            raise InputError(
                "question= goes behind a user's text: give the last message as one, or leave question= out"
            )
        messages[-1]["content"] = f"{last.rstrip()}\n\n{question}"
    if not str(messages[-1].get("content") or "").strip():
        raise InputError("the prompt is empty; write some text")
    return messages
