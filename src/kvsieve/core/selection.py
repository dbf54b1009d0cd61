"""From scores to entries: deterministic top-k with ascending output."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.types import Selection


def top_mask(scores: Tensor, counts: tuple[int, ...] | Tensor) -> Tensor:
    """Mark the best entries along the last dimension.

    Higher score first, then lower slot first, whatever the device.

    Args:
        scores: [B, ..., N].
        counts: entries to mark: one number per row of the batch, or int64 [B, H] for scores [B, H, N].

    Returns:
        bool, the shape of `scores`.

    Raises:
        ValueError: a score is NaN.
    """
    if bool(scores.isnan().any()):
        raise ValueError("scores contain NaN: the model's keys or queries hold NaN or infinity")
    length = scores.shape[-1]
    wanted = torch.as_tensor(counts, device=scores.device).clamp(0, length)
    wanted = wanted.view(*wanted.shape, *(1,) * (scores.ndim - wanted.ndim))
    largest = int(wanted.max())
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # The threshold is the count-th best score: everything above it stays, and the first of its ties fill up.
    best = scores.topk(largest, dim=-1).values
    threshold = best.gather(-1, (wanted - 1).clamp_min(0).expand(*scores.shape[:-1], 1))
    above = scores > threshold
    ties = scores == threshold
    room = wanted - above.sum(-1, keepdim=True)
    return (above | (ties & (ties.cumsum(-1) <= room))) & (wanted > 0)


def pack(mask: Tensor, counts: tuple[int, ...]) -> Selection:
    """Turn a keep-mask [B, ..., N], with ``counts[b]`` entries set in each head of row b, into a Selection."""
    size = max(counts)
    if all(count == size for count in counts):
        indices = mask.nonzero()[:, -1].view(*mask.shape[:-1], size)
        return Selection(indices)
    return Selection(_packed(mask, size), tuple(counts))


def pack_ragged(mask: Tensor) -> Selection:
    """Turn a keep-mask [B, H, N] whose heads keep different numbers of entries into a Selection, ragged if needed."""
    per_head = mask.sum(-1)
    if bool((per_head == per_head[:, :1]).all()):
        return pack(mask, tuple(per_head[:, 0].tolist()))
    lengths = tuple(per_head.amax(-1).tolist())
    return Selection(_packed(mask, max(lengths)), lengths, tuple(map(tuple, per_head.tolist())))


def select_top(scores: Tensor, counts: tuple[int, ...]) -> Selection:
    """Keep the ``counts[b]`` best entries of each head of row b of `scores` [B, ..., N]; see `top_mask`."""
    return pack(top_mask(scores, counts), counts)


def _packed(mask: Tensor, size: int) -> Tensor:
    # A stable sort of the mask moves the kept slots to the right end in ascending order, filler to the left.
    order = mask.to(torch.uint8).argsort(dim=-1, stable=True)
    return order[..., mask.shape[-1] - size :]
