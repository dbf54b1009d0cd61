"""From scores to entries: deterministic top-k with ascending output."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.types import Selection


def top_mask(scores: Tensor, counts: tuple[int, ...]) -> Tensor:
    """bool, the shape of `scores` [B, ..., N]: True for the ``counts[b]`` best entries of each line of row b.

    Higher score first, then lower slot first, whatever the device. NaN scores are refused (ValueError).
    """
    if bool(scores.isnan().any()):
        raise ValueError("scores contain NaN: the model's keys or queries hold NaN or infinity")
    length = scores.shape[-1]
    largest = max(counts)
    if largest <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # The threshold is the count-th best score: everything above it stays, and the first of its ties fill up.
    best = scores.topk(min(largest, length), dim=-1).values
    shape = (-1,) + (1,) * (scores.ndim - 1)
    wanted = torch.tensor(counts, device=scores.device).clamp(0, length).view(shape)
    threshold = best.gather(-1, (wanted - 1).clamp_min(0).expand(*scores.shape[:-1], 1))
    above = scores > threshold
    ties = scores == threshold
    room = wanted - above.sum(-1, keepdim=True)
    return (above | (ties & (ties.cumsum(-1) <= room))) & (wanted > 0)


def pack(mask: Tensor, counts: tuple[int, ...]) -> Selection:
    """Turn a keep-mask [B, ..., N] with ``counts[b]`` entries set in each line of row b into a Selection."""
    size = max(counts)
    if all(count == size for count in counts):
        indices = mask.nonzero()[:, -1].view(*mask.shape[:-1], size)
        return Selection(indices)
    # A stable sort of the mask moves the kept slots to the right end in ascending order, filler to the left.
    order = mask.to(torch.uint8).argsort(dim=-1, stable=True)
    return Selection(order[..., mask.shape[-1] - size :], tuple(counts))


def select_top(scores: Tensor, counts: tuple[int, ...]) -> Selection:
    """Keep the ``counts[b]`` best entries of each line of row b of `scores` [B, ..., N]; see `top_mask`."""
    return pack(top_mask(scores, counts), counts)
