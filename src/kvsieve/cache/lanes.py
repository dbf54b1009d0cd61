"""Slots of a flat buffer: new tokens have one per head, interleaved, and attention reads whole lanes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Equal parts into which attention may split a flat buffer, one per thread; a power of two.
LANES = 8


def whole(slots: int) -> int:
    """Round slots up to a multiple of LANES, the readable length of a flat buffer."""
    return -(-slots // LANES) * LANES


@functools.lru_cache(maxsize=64)
def turns(heads: int, slots: int, device: torch.device) -> Tensor:
    """Return the mask of interleaved slots of new tokens: bool [H, slots], shared, read-only."""
    return torch.arange(slots, device=device) % heads == torch.arange(heads, device=device)[:, None]


@functools.lru_cache(maxsize=64)
def bias_of_turns(heads: int, slots: int, after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bias of new tokens' slots, and of `after` following slots without a head: [H, slots + after]."""
    own = torch.nn.functional.pad(turns(heads, slots, device), (0, after))
    return torch.zeros(heads, slots + after, dtype=dtype, device=device).masked_fill_(~own, torch.finfo(dtype).min)


@functools.cache  # Cached forever: a recorded pass reads its address.
def bias_of_a_token(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bias of one token's slots, [H, H]."""
    return bias_of_turns(heads, heads, 0, dtype, device)
