"""Random numbers of stored entries that depend on no other row, on no padding and on no generator's state."""

from __future__ import annotations

from kvsieve.lazy import Tensor, torch
from kvsieve.types import LayerContext

_BITS = 23


def drawn(ctx: LayerContext, places: Tensor, seed: int) -> Tensor:
    """Return a random number in (0, 1) for each entry, float32 [B, H, N].

    It is a hash of the seed, the layer, the head, the token's position and the row's length now.

    Args:
        ctx: the layer.
        places: int64 [B, H, N], position of each entry in its row without padding.
        seed: of the draw.
    """
    rows = torch.tensor(ctx.step.lengths)
    key = _mixed(_mixed(_mixed(torch.tensor(seed)) + ctx.layer_idx) + rows).to(ctx.index.device, non_blocking=True)
    heads = ctx.index.shape[1]
    head = torch.arange(heads, device=ctx.index.device) + heads * ctx.ranks.rank
    bits = _mixed(_mixed(key[:, None] + head)[..., None] + places)
    return (_shifted(bits, 64 - _BITS).float() + 0.5) / (1 << _BITS)


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 numbers: the output function of SplitMix64 (Steele, Lea, Flood 2014) in two's complement."""
    x = x - 0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (x >> count) & ((1 << (64 - count)) - 1)
