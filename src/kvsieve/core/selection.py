"""Selection of entries by score: deterministic top-k, in ascending order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsieve.core.checks import refuse
from kvsieve.lazy import Tensor, torch
from kvsieve.types import Ranks, Selection


def top_mask(scores: Tensor, counts: tuple[int, ...] | Tensor) -> Tensor:
    """Mark the best entries along the last dimension, ties by the lower slot, on every device.

    Args:
        scores: [B, ..., N].
        counts: entries to mark: one number per row of the batch, or int64 [B, H] for scores [B, H, N]. A tensor should
            be on the host, which else waits for it.

    Returns:
        bool, the shape of `scores`.

    Raises:
        ValueError: a score is NaN; see `core.checks`.
    """
    length = scores.shape[-1]
    edges = torch.stack(torch.aminmax(counts)).tolist() if isinstance(counts, Tensor) else (min(counts), max(counts))
    least, largest = (min(max(edge, 0), length) for edge in edges)
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # The threshold is the count-th best score: everything above it stays, and the first of its ties fill up.
    best = scores.topk(largest, dim=-1, sorted=least < largest).values
    wanted: int | Tensor = largest
    if least == largest:
        threshold = first = best.amin(-1, keepdim=True)
    else:
        wanted = (counts if isinstance(counts, Tensor) else torch.tensor(counts)).clamp(0, length)
        wanted = wanted.to(scores.device, non_blocking=True)
        wanted = wanted.view(*wanted.shape, *(1,) * (scores.ndim - wanted.ndim))
        threshold = best.gather(-1, (wanted - 1).clamp_min(0).expand(*scores.shape[:-1], 1))
        first = best[..., :1]
    # To topk, NaN is the best score of all.
    reason = "scores contain NaN: the model's keys or queries hold NaN or infinity"
    refuse(first.isnan(), lambda: ValueError(reason))
    above = scores > threshold
    ties = scores == threshold
    room = wanted - above.sum(-1, keepdim=True)
    mask = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= room))
    return mask if least else mask & (wanted > 0)


def pack(mask: Tensor, counts: tuple[int, ...]) -> Selection:
    """Convert a keep-mask [B, ..., N], with ``counts[b]`` entries set in each head of row b, to a Selection."""
    size = max(counts)
    if all(count == size for count in counts):
        return Selection(slots_of(mask, size))
    return Selection(_packed(mask, size, counts), tuple(counts))


def pack_ragged(mask: Tensor, per_head: Sequence[Sequence[int]] | None = None) -> Selection:
    """Convert a keep-mask [B, H, N] to a Selection, ragged if heads keep different numbers of entries.

    per_head: entries set for each row and head; None to count them in the mask.
    """
    if per_head is None:
        per_head = mask.sum(-1).tolist()
    if all(count == row[0] for row in per_head for count in row):
        return pack(mask, tuple(row[0] for row in per_head))
    lengths = tuple(map(max, per_head))
    counts = tuple(map(tuple, per_head))
    return Selection(_packed(mask, max(lengths), counts), lengths, counts)


def select_top(scores: Tensor, counts: tuple[int, ...]) -> Selection:
    """Keep the ``counts[b]`` best entries of each head of row b of `scores` [B, ..., N]; see `top_mask`."""
    return pack(top_mask(scores, counts), counts)


def best_of_layers(
    layers: Mapping[int, tuple[Tensor, int]], counts: tuple[int, ...], ranks: Ranks
) -> dict[int, Tensor]:
    """Mark the best entries of all layers and heads together: bool [B, H, size] by layer, of this rank's own.

    Args:
        layers: by layer, the scores [B, heads of all ranks, N] with +inf for entries that must stay and -inf for
            filler, and `size`, the number of this rank's slots, the last of N.
        counts: entries per layer and head of each row, on average.
        ranks: the processes that share the heads.
    """
    device = next(iter(layers.values()))[0].device
    every = torch.cat([scores.flatten(1).to(device) for scores, _ in layers.values()], 1)
    heads = sum(scores.shape[1] for scores, _ in layers.values())
    total = torch.tensor(counts, device=device) * heads
    total = total.clamp(min=every.isposinf().sum(-1), max=(~every.isneginf()).sum(-1))
    masks = top_mask(every, total).split([scores[0].numel() for scores, _ in layers.values()], 1)
    return {
        index: mask.view(scores.shape)[:, ranks.own(scores.shape[1]), -size:].to(scores.device)
        for (index, (scores, size)), mask in zip(layers.items(), masks, strict=True)
    }


def slots_of(mask: Tensor, count: int) -> Tensor:
    """Return the slots set along the last dimension of a mask, ascending, `count` everywhere: int64 [..., count].

    The host does not wait for the device.
    """
    if mask.device.type == "cpu":
        return mask.nonzero()[:, -1].view(*mask.shape[:-1], count)
    return _placed(mask, mask.cumsum(-1), count)


def entries_at(part: Tensor, slots: Tensor) -> Tensor:
    """Gather the entries at slots int64 [B, H, K] of [B, H, N] or [B, H, N, D], as a copy."""
    if part.ndim == 3:
        return part.gather(2, slots)
    row, head, slot, channel = part.stride()
    whole = channel == 1 and slot > 0 and row % slot == 0 and head % slot == 0
    if part.device.type != "cpu" or not whole or not slots.numel():
        return part.gather(2, slots[..., None].expand(-1, -1, -1, part.shape[3]))
    # CPUs gather number by number, which is slower than copying whole rows.
    batch, heads, length, dim = part.shape
    places = (batch - 1) * (row // slot) + (heads - 1) * (head // slot) + length
    first = torch.arange(batch)[:, None, None] * (row // slot) + torch.arange(heads)[:, None] * (head // slot)
    found = part.as_strided((places, dim), (slot, 1)).index_select(0, (slots + first).flatten())
    return found.view(*slots.shape, dim)


def _packed(mask: Tensor, size: int, counts: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Tensor:
    """Move the kept slots, as many as `counts` per row or head, to the right end of `size` places, after filler."""
    if mask.device.type == "cpu":
        # A stable sort of the mask does so.
        order = mask.to(torch.uint8).argsort(dim=-1, stable=True)
        return order[..., mask.shape[-1] - size :]
    before = (size - torch.tensor(counts)).to(mask.device, non_blocking=True)
    return _placed(mask, mask.cumsum(-1) + before.view(*before.shape, *(1,) * (mask.ndim - before.ndim)), size)


def _placed(mask: Tensor, place: Tensor, size: int) -> Tensor:
    """Return the set slots of a mask at their places, 1 to `size`; places without a slot get 0."""
    slots = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    # Unset slots go to place 0, which is dropped.
    return place.new_zeros(*mask.shape[:-1], size + 1).scatter_(-1, place * mask, slots)[..., 1:]
