"""Prompts to measure with: Python's own documentation, cut to length."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokensPrompt:
    """ids: int64 [B, N]. mask: int64 [B, N], 0 for padding on the left; None without any."""

    ids: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device) -> TokensPrompt:
        return TokensPrompt(self.ids.to(device), None if self.mask is None else self.mask.to(device))


def text_ids(tokenizer: Any) -> Tensor:
    """int64 [1, M]: the documentation's tokens, some hundred thousand."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids


def row_lengths(length: int, rows: int) -> list[int]:
    """Lengths of the prompts of a batch: all, 7/8, 3/4, 5/8 ... of `length`, from the ninth row on again."""
    return [max(1, length * (8 - row % 8) // 8) for row in range(rows)]


def make_rows(text: Tensor, length: int, rows: int) -> list[TokensPrompt]:
    """One prompt per row, of `row_lengths`, each another stretch of the text (which starts again at its end)."""
    prompts, start = [], 0
    for size in row_lengths(length, rows):
        at = torch.arange(start, start + size) % text.shape[1]
        prompts.append(TokensPrompt(text[:, at]))
        start += size
    return prompts


def left_padded(rows: list[TokensPrompt], filler: int) -> TokensPrompt:
    """The rows as one batch."""
    if len(rows) == 1:
        return rows[0]
    size = max(row.ids.shape[1] for row in rows)
    ids = rows[0].ids.new_full((len(rows), size), filler)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, -row.ids.shape[1] :] = row.ids[0]
        mask[at, -row.ids.shape[1] :] = 1
    return TokensPrompt(ids, mask)
