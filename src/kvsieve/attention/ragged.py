"""Attention of one new token over entries that heads keep in different numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention.blocked import single_query_attention
from kvsieve.kernels.cpu import token as native
from kvsieve.kernels.cpu.cores import asked_threads
from kvsieve.types import AttentionTerms

# Slots below which a part of its own is not worth a thread.
_LEAST = 256


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    scale: float,
    threads: int | None = None,
    terms: AttentionTerms | None = None,
) -> Tensor:
    """Attention of each KV head's queries over that head's entries of a flat buffer.

    One call for all heads: a head's queries meet the other heads' entries too and are masked there, which costs
    arithmetic, of which decoding has plenty, and reads every key and value once. torch gives such a call one thread per
    row, so on a CPU the buffer is cut into as many equal parts as there are threads, merged by their log-sum-exp. Where
    there is a compiler, a kernel in C reads each head's own entries alone.

    Args:
        query: [B, Hq, 1, D].
        keys: [B, T, D], all heads' entries.
        values: [B, T, Dv].
        bias: [B, H, T] in the keys' dtype, 0 for a head's own entries and the dtype's least number for the others.
        scale: factor of the query-key products.
        threads: CPU threads; None asks torch, which a compiled pass cannot do.
        terms: cap and sinks; None for neither.

    Returns:
        [B, Hq, 1, Dv].
    """
    if kernels.usable(query, keys, values, bias):
        return kernels.ragged_decode(query, keys, values, bias, scale=scale, terms=terms)
    if terms is None and threads is None and native.serves(query, keys, values, bias.shape[0] * bias.shape[1]):
        return native.ragged_token_attention(query, keys, values, bias, scale=scale)
    batch, query_heads, _, dim = query.shape
    heads, slots = bias.shape[1:]
    if terms is not None:
        own = (bias == 0).repeat_interleave(query_heads // heads, 1)[:, None]
        asked = query.transpose(1, 2)
        return single_query_attention(asked, keys[:, None], values[:, None], own, scale=scale, terms=terms).transpose(
            1, 2
        )
    threads = asked_threads() if threads is None else threads
    parts = _parts(batch, slots, threads) if query.device.type == "cpu" and dim == values.shape[-1] else 1
    packed = query.reshape(batch, 1, query_heads, dim).expand(-1, parts, -1, -1)
    keys, values = (part.unflatten(1, (parts, -1)) for part in (keys, values))
    mask = bias.unflatten(2, (parts, -1)).transpose(1, 2).repeat_interleave(query_heads // heads, 2)
    if parts == 1:
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    else:
        out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            packed, keys, values, attn_mask=mask, scale=scale
        )
        out = (out * norm.softmax(1)[..., None]).sum(1).to(out.dtype)
    return out.reshape(batch, query_heads, 1, values.shape[-1])


def _parts(batch: int, slots: int, threads: int) -> int:
    """Number of parts that each row is cut into: a power of two that divides `slots`."""
    wanted = min(-(-threads // batch), slots // _LEAST)
    parts = 1
    while parts * 2 <= wanted and slots % (parts * 2) == 0:
        parts *= 2
    return parts
