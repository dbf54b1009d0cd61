"""Attention of one new token over the entries that a reader has chosen."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.core.kv_rows import Choice, KVRows


def sparse_attention(query: Tensor, kv_rows: KVRows, choice: Choice, *, scale: float) -> Tensor:
    """Attention over the chosen entries only.

    The chosen keys and values are copied first, where no kernel reads them in place.

    Args:
        query: [X, G, D], the G query heads of each KV row.
        kv_rows: what the entries were chosen from.
        choice: the chosen entries.
        scale: factor of the query-key products.

    Returns:
        [X, G, Dv].
    """
    entries = choice.entries
    if kernels.usable(query, kv_rows.keys, kv_rows.values):
        out = kernels.kv_row_attention(query, kv_rows, entries, scale=scale)
    else:
        keys, values = kv_rows.read(entries)
        if entries.ndim == 2:
            out = F.scaled_dot_product_attention(query[:, None], keys[:, None], values[:, None], scale=scale)[:, 0]
        else:
            out = F.scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale)[:, :, 0]
    if choice.blend is not None:
        weight, vector = choice.blend
        weight = weight[..., None]
        out = (weight * out + (1 - weight) * vector[:, None]).to(query.dtype)
    return out
