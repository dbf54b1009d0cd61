"""Attention of one new token over the entries that a reader has chosen."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvsieve.core.lines import Choice, Lines


def sparse_attention(query: Tensor, lines: Lines, choice: Choice, *, scale: float) -> Tensor:
    """query: [X, G, D], the G query heads of each line. Returns [X, G, Dv]; only the chosen rows are gathered."""
    keys, values = lines.read(choice.entries)
    if choice.entries.ndim == 2:
        out = F.scaled_dot_product_attention(query[:, None], keys[:, None], values[:, None], scale=scale)[:, 0]
    else:
        out = F.scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale)[:, :, 0]
    if choice.blend is not None:
        weight, vector = choice.blend
        weight = weight[..., None]
        out = (weight * out + (1 - weight) * vector[:, None]).to(query.dtype)
    return out
