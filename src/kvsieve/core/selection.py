"""From scores to entries: deterministic top-k with ascending output."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.core.checks import refuse
from kvsieve.types import Selection


def top_mask(scores: Tensor, counts: tuple[int, ...] | Tensor) -> Tensor:
    """Mark the best entries along the last dimension.

    Higher score first, then lower slot first, whatever the device.

    Args:
        scores: [B, ..., N].
        counts: entries to mark: one number per row of the batch, or int64 [B, H] for scores [B, H, N]. A tensor had
            better be the host's, which else waits for it.

    Returns:
        bool, the shape of `scores`.

    Raises:
        ValueError: a score is NaN; see `core.checks`.
    """
    wanted = (counts if isinstance(counts, Tensor) else torch.tensor(counts)).clamp(0, scores.shape[-1])
    least, largest = torch.stack(torch.aminmax(wanted)).tolist()
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # The threshold is the count-th best score: everything above it stays, and the first of its ties fill up.
    best = scores.topk(largest, dim=-1, sorted=least < largest).values
    if least == largest:
        wanted, threshold = largest, best.amin(-1, keepdim=True)
        first = threshold
    else:
        wanted = wanted.to(scores.device, non_blocking=True)
        wanted = wanted.view(*wanted.shape, *(1,) * (scores.ndim - wanted.ndim))
        threshold = best.gather(-1, (wanted - 1).clamp_min(0).expand(*scores.shape[:-1], 1))
        first = best[..., :1]
    # To topk, NaN is the best score of all.
    refuse(first.isnan(), _nan)
    above = scores > threshold
    ties = scores == threshold
    room = wanted - above.sum(-1, keepdim=True)
    mask = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= room))
    return mask if least else mask & (wanted > 0)


def _nan() -> Exception:
    return ValueError("scores contain NaN: the model's keys or queries hold NaN or infinity")


def pack(mask: Tensor, counts: tuple[int, ...]) -> Selection:
    """Turn a keep-mask [B, ..., N], with ``counts[b]`` entries set in each head of row b, into a Selection."""
    size = max(counts)
    even = all(count == size for count in counts)
    if mask.device.type != "cpu":
        indices = _placed(mask, size, None if even else torch.tensor(counts))
    elif even:
        indices = mask.nonzero()[:, -1].view(*mask.shape[:-1], size)
    else:
        indices = _packed(mask, size)
    return Selection(indices, None if even else tuple(counts))


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


def _placed(mask: Tensor, size: int, counts: Tensor | None) -> Tensor:
    """Slots of the entries set in a mask, ascending, at the right end of `size` places, and 0 before them.

    The host waits for nothing: how many are set is known. That is ``counts[b]`` in row b, `size` where None is given.
    """
    place = mask.cumsum(-1)
    if counts is not None:
        before = (size - counts).to(mask.device, non_blocking=True)
        place = place + before.view(*before.shape, *(1,) * (mask.ndim - before.ndim))
    # What is not set goes to a place of its own, the first.
    slots = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    return place.new_zeros(*mask.shape[:-1], size + 1).scatter_(-1, place * mask, slots)[..., 1:]


def _packed(mask: Tensor, size: int) -> Tensor:
    # A stable sort of the mask moves the kept slots to the right end in ascending order, filler to the left.
    order = mask.to(torch.uint8).argsort(dim=-1, stable=True)
    return order[..., mask.shape[-1] - size :]
