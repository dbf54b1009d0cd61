"""Truncated matrix entropy of every head's queries, for UNComp (arXiv 2410.03090)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.planning.profiles import Heads, numbers
from kvsieve.types import LayerContext

# Eigenvalues that count, as in the public code.
LARGEST = 32


@dataclass
class QueryEntropies:
    """Entropies of the queries of every layer, summed over passes."""

    sums: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[int, int] = field(default_factory=dict)

    def see(self, ctx: LayerContext) -> None:
        """Add a layer's entropies. ctx: a pass over a whole text, unpadded."""
        layer = ctx.layer_idx
        found = truncated_entropy(ctx.query[0]).unflatten(0, (ctx.keys.shape[1], -1)).mean(1)
        self.sums[layer] = self.sums.get(layer, torch.zeros_like(found)) + found
        self.passes[layer] = self.passes.get(layer, 0) + 1

    def result(self, layers: int, kv_heads: int) -> tuple[Heads, dict[str, Any]]:
        """Return the means [layers][KV heads], 0 for layers with local attention, and the numbers for tables."""
        means = {layer: (total / self.passes[layer]).tolist() for layer, total in self.sums.items()}
        flat = [value for layer in means.values() for value in layer] or [0.0]
        found = [[round(value, 6) for value in means.get(layer, [0.0] * kv_heads)] for layer in range(layers)]
        return numbers(found, 2), {"lowest": round(min(flat), 4), "highest": round(max(flat), 4)}


def truncated_entropy(queries: Tensor, largest: int = LARGEST) -> Tensor:
    """Return the truncated matrix entropy of each head, over log D.

    Queries are centred and scaled to length 1. The sum of -x log x runs over the largest eigenvalues x of their
    covariance at trace 1.

    Args:
        queries: [Hq, N, D].
        largest: eigenvalues that count.

    Returns:
        float64 [Hq] on the CPU, in [0, 1].
    """
    centred = queries.to("cpu", torch.float64)
    centred = centred - centred.mean(1, keepdim=True)
    scaled = torch.nn.functional.normalize(centred, dim=-1)
    covariance = scaled.transpose(1, 2) @ scaled
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    values = torch.linalg.eigvalsh(covariance / trace[:, None, None]).clamp_min(0)[:, -largest:]
    return -torch.special.xlogy(values, values).sum(-1) / math.log(max(queries.shape[-1], 2))
