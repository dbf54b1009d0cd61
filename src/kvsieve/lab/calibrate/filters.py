"""Q-Filters' directions (arXiv 2503.02812), and how well they predict attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.core.scoring import group_mean, mass_of
from kvsieve.lab.calibrate.reading import read
from kvsieve.planning.plans import Plan
from kvsieve.types import LayerContext

# Last queries, with whose attention the check compares.
CHECKED = 64


@dataclass
class QuerySums:
    """Second moments and sums of the queries of every layer and query head, which determine the directions.

    The principal right-singular vector of all queries, stacked, is the first eigenvector of their second moment.
    """

    moments: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    kv_heads: dict[int, int] = field(default_factory=dict)

    def see(self, ctx: LayerContext) -> None:
        queries = ctx.query[0].to("cpu", torch.float64)
        moment = queries.transpose(1, 2) @ queries
        total = queries.sum(1)
        layer = ctx.layer_idx
        self.moments[layer] = self.moments.get(layer, torch.zeros_like(moment)) + moment
        self.sums[layer] = self.sums.get(layer, torch.zeros_like(total)) + total
        self.kv_heads[layer] = ctx.keys.shape[1]

    def result(self, layers: int, kv_heads: int, dim: int) -> list[Tensor]:
        """Return unit vectors float64 [KV heads, D] per layer; zeros for layers with local attention."""
        nothing = torch.zeros(kv_heads, dim, dtype=torch.float64)
        return [
            directions(self.moments[layer], self.sums[layer], self.kv_heads[layer])
            if layer in self.moments
            else nothing
            for layer in range(layers)
        ]


def directions(moments: Tensor, sums: Tensor, kv_heads: int) -> Tensor:
    """Return unit vectors [H, D] from second moments [Hq, D, D] and sums [Hq, D] of each query head's queries.

    Each query head's principal direction gets the sign with which its mean query projects positively. These are
    averaged over the query heads that share a KV head, and normalized.
    """
    principal = torch.linalg.eigh(moments).eigenvectors[..., -1]
    sign = torch.where((principal * sums).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    shared = (principal * sign).unflatten(0, (kv_heads, -1)).mean(1)
    return shared / shared.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(shared.dtype).tiny)


def correlation(ctx: LayerContext, filters: Tensor) -> list[float]:
    """Return the rank correlation (Spearman) per KV head of filtered keys with their attention mass.

    It covers the entries before the last 64 queries: their keys' projections on filters [H, D], and the attention mass
    from those queries.
    """
    window = min(CHECKED, ctx.query.shape[2] // 2)
    mass = mass_of(ctx, -window)
    mass = group_mean(mass, ctx.keys.shape[1])[0, :, :-window].double().cpu()
    keys = ctx.keys[0, :, :-window].to("cpu", torch.float64)
    scores = (keys @ filters[:, :, None]).squeeze(-1)
    return [_pearson(_ranks(one), _ranks(other)) for one, other in zip(scores, mass, strict=True)]


def checked(model: Any, filters: Sequence[Tensor], ids: Tensor) -> dict[str, Any]:
    """Return the rank correlations of a model's filters, [H, D] per layer, on a prompt, ids [1, N]; see `correlation`.

    Raises the errors of `attach` for an unsupported model.
    """
    found: dict[int, list[float]] = {}

    def see(ctx: LayerContext) -> None:
        found[ctx.layer_idx] = correlation(ctx, filters[ctx.layer_idx])

    read(model, Plan(), ids, see)
    flat = [value for layer in found.values() for value in layer]
    return {
        "correlation": round(sum(flat) / max(len(flat), 1), 3),
        "negative": f"{sum(value < 0 for value in flat)} of {len(flat)}",
        "correlations": [[round(v, 3) for v in found.get(layer, [])] for layer in range(len(filters))],
    }


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(stable=True).argsort().double()


def _pearson(one: Tensor, other: Tensor) -> float:
    one = one - one.mean()
    other = other - other.mean()
    scale = (one.norm() * other.norm()).item()
    return (one @ other).item() / scale if scale else 0.0
