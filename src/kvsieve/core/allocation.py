"""How a budget is shared out among layers or heads: bounded, in whole entries, and with an exact total."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvsieve.core.selection import top_mask


def water_fill(weights: Sequence[float], total: int, floors: Sequence[int], caps: Sequence[int]) -> list[float]:
    """Shares in proportion to `weights`, within floors and caps, that sum to `total` or as near as the bounds allow.

    Each is ``clip(level * weight, floor, cap)`` with one level for all; once the others are full, those of weight 0 get
    alike. A further party lowers the level, so shares only ever shrink as parties are added. Raises ValueError for
    weights that are negative or not finite.
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
        # Whoever is off by more in sum stays where it is bounded, whatever becomes of the others.
        short, over = sum(low.values()), sum(high.values())
        for bounds, held, other in ((floors, low, over), (caps, high, short)):
            if held and sum(held.values()) >= other:
                for i in held:
                    shares[i] = bounds[i]
                    rest -= bounds[i]
                    del left[i]
    return shares


def allocate(weights: Sequence[float], total: int, floors: Sequence[int], caps: Sequence[int]) -> list[int]:
    """`water_fill` in whole entries that sum exactly to `total`, or to the nearest sum that the bounds allow.

    Fractions are rounded by the largest remainder; equal ones, up to rounding errors, go to the lower index.
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
    """Context entries of each layer, falling linearly from the first to the last, `budget` of them on average.

    length: tokens of the prompt, `window` of which are kept besides. The last layer gets a `beta`-th of the budget; no
    layer more than there are; all the same while the prompt is shorter than twice the budget. floored: whole steps from
    layer to layer, as the original code has them, which sum to more than the budget.
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
    """int64 [B, H]: how many of the ``counts[b]`` best of all heads' `scores` [B, H, N] each head has; -inf never wins.

    Ties go to the lower head, then the lower slot.
    """
    flat = scores.flatten(1)
    best = top_mask(flat, tuple(counts)) & ~flat.isneginf()
    return best.view(scores.shape).sum(-1)


def clusters(values: Sequence[float], count: int) -> list[int]:
    """Which of at most `count` clusters each value is in, 0 for the smallest values: 1-D k-means, solved exactly.

    The partition of the sorted values with the least sum of squared distances to the means, by dynamic programming;
    equal values share a cluster, and of equally good partitions the one with the larger upper clusters is taken.
    """
    points = sorted(set(values))
    sizes = [list(values).count(point) for point in points]
    found = min(count, len(points))

    @functools.cache
    def spread(first: int, stop: int) -> float:
        part = list(zip(points[first:stop], sizes[first:stop], strict=True))
        mean = sum(size * point for point, size in part) / sum(sizes[first:stop])
        return sum(size * (point - mean) ** 2 for point, size in part)

    # Least cost of the first `stop` points in so many clusters, and where the last of them begins.
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
    label, stop = {}, len(points)
    for cluster in range(found, 0, -1):
        first = best[cluster][stop][1]
        label.update(dict.fromkeys(points[first:stop], cluster - 1))
        stop = first
    return [label[value] for value in values]


def tokens_reaching(mass: Tensor, target: float) -> Tensor:
    """float [B]: fewest entries that hold `target` of the `mass` [B, H, N] of each head, mean over heads."""
    ordered = mass.sort(-1, descending=True).values.cumsum(-1)
    short = ordered < target * ordered[..., -1:]
    return (short.sum(-1) + 1).to(torch.float64 if mass.dtype == torch.float64 else torch.float32).mean(-1)
