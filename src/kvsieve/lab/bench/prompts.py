"""Prompts for benchmarks: Python's help texts, shipped with kvsieve, cut to length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError
from kvsieve.hf.model.context import context_of
from kvsieve.lab.tasks.haystack import load_haystack


@dataclass(frozen=True, eq=False)
class TokensPrompt:
    """Tokens of prompts. ids: int64 [B, N]. mask: int64 [B, N], 0 for padding on the left; None without any."""

    ids: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device) -> TokensPrompt:
        return TokensPrompt(self.ids.to(device), None if self.mask is None else self.mask.to(device))


def text_ids(tokenizer: Any) -> Tensor:
    """Return the help texts' tokens, int64 [1, M], some hundred thousand."""
    return tokenizer(load_haystack("topics"), add_special_tokens=False, return_tensors="pt", verbose=False).input_ids


def row_lengths(length: int, rows: int) -> list[int]:
    """Return the lengths of a batch's prompts: all, 7/8, 3/4, 5/8 ... of `length`, repeating from the ninth row."""
    return [max(1, length * (8 - row % 8) // 8) for row in range(rows)]


def make_rows(text: Tensor, length: int, rows: int) -> list[TokensPrompt]:
    """Return one prompt per row, of `row_lengths`, each another part of the text (which repeats after its end)."""
    prompts = []
    start = 0
    for size in row_lengths(length, rows):
        prompts.append(TokensPrompt(text[:, torch.arange(start, start + size) % text.shape[1]]))
        start += size
    return prompts


def left_padded(rows: list[TokensPrompt], filler: int) -> TokensPrompt:
    if len(rows) == 1:
        return rows[0]
    ids = rows[0].ids.new_full((len(rows), max(row.ids.shape[1] for row in rows)), filler)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, -row.ids.shape[1] :] = row.ids[0]
        mask[at, -row.ids.shape[1] :] = 1
    return TokensPrompt(ids, mask)


def lengths_of(model: Any, lengths: list[int], new_tokens: int, *, whole: bool, fitting: bool) -> list[int]:
    """Return the lengths of prompts, ascending, after checking the model's context.

    Args:
        model: with the context.
        lengths: as given.
        new_tokens: after each prompt.
        whole: add the longest prompt that fits.
        fitting: drop lengths that do not fit, except for the longest that does.

    Raises:
        InputError: lengths exceed the model's context, or the context is unknown.
    """
    context = context_of(model.config)
    if context is None:
        if whole:
            raise InputError("--lengths context: the model's config has no max_position_embeddings; name the tokens")
        return sorted(set(lengths))
    most = context - new_tokens
    if fitting and max(lengths) > most:
        lengths = [length for length in lengths if length <= most]
        whole = True
    if lengths and max(lengths) > most:
        raise InputError(
            f"--lengths {max(lengths)} and {new_tokens} new tokens are more than the model's context of {context}"
        )
    if most < 1:
        raise InputError(f"--new-tokens {new_tokens} leave nothing of the model's context of {context} to a prompt")
    return sorted({*lengths, most} if whole else set(lengths))
