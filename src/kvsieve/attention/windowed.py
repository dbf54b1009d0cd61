"""Attention of layers that look back no further than a window, or the beginning of a chunk, given by positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.attention.dense import dense_attention, real_entries
from kvsieve.attention.masked import masked_attention
from kvsieve.types import AttentionTerms

# Queries of a block; its keys are as many and a window's.
_QUERIES = 512


@dataclass(frozen=True)
class Window:
    """Stretch of the tokens before that a token sees.

    Attributes:
        span: positions of a window, its own among them, or of a chunk.
        chunked: True for chunks, which begin at multiples of `span`.
    """

    span: int
    chunked: bool = False

    def sees(self, asking: Tensor, stored: Tensor) -> Tensor:
        """Tell which stored positions a token sees, bool of the shape that both have together."""
        near = asking // self.span == stored // self.span if self.chunked else stored > asking - self.span
        return near & (stored <= asking)


def window_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    window: Window,
    *,
    scale: float,
    valid: Tensor | None = None,
    terms: AttentionTerms | None = None,
) -> Tensor:
    """Causal attention of the last L of N stored entries over those of the N that their window shows them.

    Args:
        query: [B, Hq, L, D].
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        positions: int [B, N], of the stored entries, ascending in each row among its real ones.
        window: what a token sees.
        scale: factor of the query-key products.
        valid: bool [B, N], False for padding; None when all entries are real. The output for padding is finite and
            otherwise undefined.
        terms: further terms of the logits, None for none.

    Returns:
        [B, Hq, L, Dv].
    """
    new, length = query.shape[2], keys.shape[2]
    if valid is not None:
        return _rows_alone(query, keys, values, positions, window, scale, valid, terms)
    if length <= window.span and not window.chunked:
        close = positions[:, -1] - positions[:, 0] < window.span
        if bool(close.all()):
            return dense_attention(query, keys, values, scale=scale, terms=terms)
    positions = positions.long()
    parts = []
    for first in range(0, new, _QUERIES):
        last = min(first + _QUERIES, new)
        # Positions ascend, so no more than a window's entries before the first query can be seen.
        low, seen = max(length - new + first - window.span + 1, 0), length - new + last
        asking = positions[:, length - new + first : seen]
        mask = window.sees(asking[:, :, None], positions[:, None, low:seen])[:, None]
        part = query[:, :, first:last], keys[:, :, low:seen], values[:, :, low:seen]
        parts.append(masked_attention(*part, mask, scale=scale, terms=terms))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _rows_alone(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    window: Window,
    scale: float,
    valid: Tensor,
    terms: AttentionTerms | None,
) -> Tensor:
    """Attend row by row over the real entries only; see `dense_attention`."""
    groups, new = query.shape[1] // keys.shape[1], query.shape[2]
    out = values[:, :, -new:].repeat_interleave(groups, 1)
    for row, real in enumerate(valid):
        fresh = real[-new:]
        if bool(fresh.any()):
            asked = real_entries(query[row], fresh)[None]
            mine, theirs = (real_entries(part[row], real)[None] for part in (keys, values))
            found = window_attention(
                asked, mine, theirs, positions[row : row + 1, real], window, scale=scale, terms=terms
            )
            out[row, :, fresh.nonzero()[:, 0]] = found[0]
    return out
