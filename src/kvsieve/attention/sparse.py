"""Attention of one new token over the entries that a reader has chosen."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap
from kvsieve.types import AttentionTerms


def sparse_attention(
    query: Tensor, kv_rows: KVRows, choice: Choice, *, scale: float, terms: AttentionTerms | None = None
) -> Tensor:
    """Attention over the chosen entries only.

    The chosen keys and values are copied first, where no kernel reads them in place.

    Args:
        query: [X, G, D], the G query heads of each KV row.
        kv_rows: what the entries were chosen from.
        choice: the chosen entries.
        scale: factor of the query-key products.
        terms: cap and sinks, [X, G]; None for neither. Where the choice blends something in, sinks get what they would
            beside all entries: the chosen ones are `weight` of those.

    Returns:
        [X, G, Dv].
    """
    if terms is not None:
        return _with_terms(query, kv_rows, choice, scale, terms)
    entries = choice.entries
    if kernels.usable(query, kv_rows.keys, kv_rows.values):
        out = kernels.kv_row_attention(query, kv_rows, entries, scale=scale)
    else:
        keys, values = kv_rows.read(entries)
        if entries.ndim == 2:
            out = F.scaled_dot_product_attention(query[:, None], keys[:, None], values[:, None], scale=scale)[:, 0]
        else:
            out = F.scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale)[:, :, 0]
    return out if choice.blend is None else _blended(out, choice.blend).to(query.dtype)


def _with_terms(query: Tensor, kv_rows: KVRows, choice: Choice, scale: float, terms: AttentionTerms) -> Tensor:
    keys, values = kv_rows.read(choice.entries)
    if choice.entries.ndim == 2:
        keys, values = keys[:, None], values[:, None]
    asked = query[:, None] if choice.entries.ndim == 2 else query[:, :, None]
    logits = cap((asked @ keys.transpose(2, 3)) * scale, terms)
    out = (logits.softmax(-1) @ values).reshape(*query.shape[:2], -1)
    norm = logits.to(score_dtype(logits.dtype)).logsumexp(-1).reshape(query.shape[:2])
    if choice.blend is not None:
        out, norm = _blended(out, choice.blend), norm - choice.blend[0].log()
    if terms.sinks is not None:
        out = out * (norm - terms.sinks).sigmoid()[..., None]
    return out.to(query.dtype)


def _blended(out: Tensor, blend: tuple[Tensor, Tensor]) -> Tensor:
    weight, vector = blend
    weight = weight[..., None]
    return weight * out + (1 - weight) * vector[:, None]
