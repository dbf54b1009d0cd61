"""Attention of one new token over entries that heads keep in different numbers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def ragged_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *, scale: float, hides_newest: bool = True
) -> Tensor:
    """Each KV head's queries attend to that head's entries of a flat buffer; the newest is seen in any case.

    query: [B, Hq, 1, D]; keys: [B, T, D]; values: [B, T, Dv], all heads' entries, the last H slots those of the new
    token; visible: bool [B, H, T]; hides_newest: False when it shows every head its newest. Returns [B, Hq, 1, Dv].

    One call for all heads: a head's queries meet the other heads' entries too and are masked there, which costs
    arithmetic, of which decoding has plenty, and reads every key and value once.
    """
    batch, query_heads, _, dim = query.shape
    heads, slots = visible.shape[1:]
    mask = visible.repeat_interleave(query_heads // heads, 1)[:, None]
    if hides_newest:
        mask[..., slots - heads :].unflatten(2, (heads, -1)).diagonal(dim1=2, dim2=4).fill_(True)
    out = F.scaled_dot_product_attention(
        query.reshape(batch, 1, query_heads, dim), keys[:, None], values[:, None], attn_mask=mask, scale=scale
    )
    return out.reshape(batch, query_heads, 1, values.shape[-1])
