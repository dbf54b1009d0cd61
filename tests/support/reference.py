"""Slow, obviously right definition of attention over stored entries."""

from __future__ import annotations

import torch
from torch import Tensor

from attend import AttentionTerms


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    valid: Tensor | None = None,
    terms: AttentionTerms | None = None,
) -> Tensor:
    """Causal attention of the last L of N entries over all N, one query head at a time, in float64.

    Shapes are those of `attention.request`; the result is [B, Hq, L, Dv], in the dtype of `query`. Every query sees
    itself, also one that is not valid.
    """
    batch, query_heads, new, _ = query.shape
    heads, length = keys.shape[1], keys.shape[2]
    out = torch.empty(batch, query_heads, new, values.shape[-1], dtype=torch.float64, device=query.device)
    slots = torch.arange(length, device=query.device)
    own = slots[length - new :, None]
    for row in range(batch):
        for head in range(query_heads):
            shared = head // (query_heads // heads)
            logits = query[row, head].double() @ keys[row, shared].double().T * scale
            if terms is not None and terms.softcap is not None:
                logits = terms.softcap * torch.tanh(logits / terms.softcap)
            seen = slots <= own
            if valid is not None:
                seen &= valid[row, min(shared, valid.shape[1] - 1)] | (slots == own)
            logits = logits.masked_fill(~seen, float("-inf"))
            if terms is not None and terms.sinks is not None:
                logits = torch.cat([logits, terms.sinks[head].double().expand(new, 1)], -1)
            out[row, head] = logits.softmax(-1)[:, :length] @ values[row, shared].double()
    return out.to(query.dtype)
