"""Division of a budget among layers or heads, in whole entries, within bounds and with an exact total."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from kvsieve.core.selection import top_mask
from kvsieve.lazy import Tensor, torch


def water_fill(weights: Sequence[float], total: int, floors: Sequence[int], caps: Sequence[int]) -> list[float]:
    """Divide `total` in proportion to weights, within bounds.

    Each share is ``clip(level * weight, floor, cap)`` with one level for all. Once the others are full, those of weight
    0 get equal shares. Adding a party never raises the shares of the others.

    Args:
        weights: one per party, finite and not negative.
        total: entries to divide.
        floors: least share of each party.
        caps: largest share of each party.

    Returns:
        Shares that sum to `total`, or as close to it as the bounds allow.

    Raises:
        ValueError: a weight is negative or not finite.
    """
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    shares = [0.0] * len(weights)
    rest: float = min(max(total, sum(floors)), sum(caps))
    largest = max(weights, default=0)
    left = {i: weight / largest if largest > 0 else 1.0 for i, weight in enumerate(weights)}
    while left:
        mass = sum(left.values())
        for i, weight in left.items():
            shares[i] = rest * weight / mass if mass > 0 else rest / len(left)
        low = {i: floors[i] - shares[i] for i in left if shares[i] < floors[i]}
        high = {i: shares[i] - caps[i] for i in left if shares[i] > caps[i]}
        if not low and not high:
            break
        # The side with the larger sum of excess stays at its bound in any case.
        short = sum(low.values())
        over = sum(high.values())
        for bounds, excess, other in ((floors, low, over), (caps, high, short)):
            if excess and sum(excess.values()) >= other:
                for i in excess:
                    shares[i] = bounds[i]
                    rest -= bounds[i]
                    del left[i]
    return shares


def allocate(weights: Sequence[float], total: int, floors: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Divide `total` as `water_fill` does, in whole entries.

    Fractions are rounded by the largest remainder; ties, up to rounding errors, favour the lower index.
    """
    shares = water_fill(weights, total, floors, caps)
    whole = [
        min(max(math.floor(share + 1e-9), low), high) for share, low, high in zip(shares, floors, caps, strict=True)
    ]
    missing = min(max(total, sum(floors)), sum(caps)) - sum(whole)
    order = sorted(range(len(shares)), key=lambda i: (-round(shares[i] - whole[i], 9), i))
    while missing > 0:
        for i in order:
            if missing > 0 and whole[i] < caps[i]:
                whole[i] += 1
                missing -= 1
    return whole


def pyramid(
    length: int, window: int, budget: int, layers: int, beta: int = 20, *, floored: bool = False
) -> list[float]:
    """Return the context entries of each layer, falling linearly from the first to the last with mean `budget`.

    No layer gets more than there are. All get the same while the prompt is shorter than twice the budget.

    Args:
        length: tokens of the prompt.
        window: tokens of the prompt that are kept in addition.
        budget: average entries per layer.
        layers: number of layers.
        beta: the last layer gets 1 / `beta` of the budget.
        floored: whole steps from layer to layer, as in the original code; they sum to more than the budget.
    """
    if length < max(2 * budget, budget + window) or layers == 1:
        return [budget] * layers
    least = budget // beta
    most = min(2 * budget - least, length - window)
    least = 2 * budget - most
    if floored:
        return [most - layer * ((most - least) // (layers - 1)) for layer in range(layers)]
    return [most - layer * (most - least) / (layers - 1) for layer in range(layers)]


def winners(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Count how many of the ``counts[b]`` best scores of all heads each head has.

    -inf never wins; ties go to the lower head, then the lower slot.

    Args:
        scores: [B, H, N].
        counts: one number per row.

    Returns:
        int64 [B, H].
    """
    flat = scores.flatten(1)
    best = top_mask(flat, tuple(counts)) & ~flat.isneginf()
    return best.view(scores.shape).sum(-1)


def clusters(values: Sequence[float], count: int) -> list[int]:
    """Assign each value to one of at most `count` clusters by exact 1-D k-means.

    Dynamic programming finds the partition of the sorted values with the least squared distances to the means. Equal
    values share a cluster; ties favour larger upper clusters.

    Returns:
        Cluster index of each value, 0 for the smallest values.
    """
    points = sorted(set(values))
    sizes = [list(values).count(point) for point in points]
    found = min(count, len(points))

    @functools.cache
    def spread(first: int, stop: int) -> float:
        part = list(zip(points[first:stop], sizes[first:stop], strict=True))
        mean = sum(size * point for point, size in part) / sum(sizes[first:stop])
        return sum(size * (point - mean) ** 2 for point, size in part)

    # Least cost of the first `stop` points in this many clusters, and the start of the last one.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(found):
        before = best[-1]
        best.append(
            {
                stop: min((before[first][0] + spread(first, stop), first) for first in before if first < stop)
                for stop in range(1, len(points) + 1)
                if any(first < stop for first in before)
            }
        )
    label = {}
    stop = len(points)
    for cluster in range(found, 0, -1):
        first = best[cluster][stop][1]
        label.update(dict.fromkeys(points[first:stop], cluster - 1))
        stop = first
    return [label[value] for value in values]


def tokens_reaching(mass: Tensor, target: float) -> Tensor:
    """Count the fewest entries with the share `target` of each head's `mass` [B, H, N]; mean over heads, float [B]."""
    ordered = mass.sort(-1, descending=True).values.cumsum(-1)
    short = ordered < target * ordered[..., -1:]
    return (short.sum(-1) + 1).to(torch.float64 if mass.dtype == torch.float64 else torch.float32).mean(-1)
