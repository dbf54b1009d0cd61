"""Slots of a flat buffer: new tokens have one per head in turn, and attention reads whole lanes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Into how many equal parts attention may cut a flat buffer, one per thread; a power of two.
LANES = 8


def whole(slots: int) -> int:
    """Round slots up to a multiple of LANES, as far as a flat buffer is read."""
    return -(-slots // LANES) * LANES


@functools.lru_cache(maxsize=64)
def turns(heads: int, slots: int, device: torch.device) -> Tensor:
    """Mask of one slot per head in turn, as new tokens are stored: bool [H, slots], shared, not to be written to."""
    return torch.arange(slots, device=device) % heads == torch.arange(heads, device=device)[:, None]


@functools.lru_cache(maxsize=64)
def bias_of_turns(heads: int, slots: int, after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bias of new tokens' slots, and of `after` slots behind them that belong to no head: [H, slots + after]."""
    own = torch.nn.functional.pad(turns(heads, slots, device), (0, after))
    return torch.zeros(heads, slots + after, dtype=dtype, device=device).masked_fill_(~own, torch.finfo(dtype).min)


@functools.cache  # For good: a recorded pass reads it where it lies.
def bias_of_a_token(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bias of one token's slots, [H, H]."""
    return bias_of_turns(heads, heads, 0, dtype, device)
