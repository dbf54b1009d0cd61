"""Attention over entries of equal number per head: torch's scaled_dot_product_attention, or whatever is faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvsieve import kernels
from kvsieve.attention.blocked import single_query_attention
from kvsieve.attention.causal import causal_attention
from kvsieve.attention.choice import LONG, faster_for_token, faster_here
from kvsieve.attention.chunk import can_split, chunk_attention, token_attention
from kvsieve.kernels.cpu import token as native
from kvsieve.types import AttentionTerms

# Elements of one boolean mask block; a prompt of any length needs no N x N mask.
_MASK_ELEMENTS = 1 << 25


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    valid: Tensor | None = None,
    terms: AttentionTerms | None = None,
) -> Tensor:
    """Causal attention of the last L of N stored entries over all N.

    Entry j is visible to query i when j <= N - L + i and j is valid; every query sees itself. The output for padding is
    finite and otherwise undefined. Keys and values are never repeated in memory while decoding.

    Args:
        query: [B, Hq, L, D].
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        scale: factor of the query-key products.
        valid: bool [B, H or 1, N], False for padding; None when all entries are real.
        terms: cap and sinks; None for neither. torch's kernels know neither, so attention with terms is two matrix
            products, but for sinks alone on a CPU, where the fused kernel tells the log-sum-exp.

    Returns:
        [B, Hq, L, Dv].
    """
    batch, query_heads, new, _ = query.shape
    length = keys.shape[2]
    groups = query_heads // keys.shape[1]
    if new == 1:
        return _one_token(query, keys, values, scale, valid, terms)
    if valid is not None and valid.shape[1] == 1:
        return _rows_alone(query, keys, values, scale, valid, terms)
    # Products into given buffers, and the kernel that tells its log-sum-exp, have no gradient.
    plain = not (torch.is_grad_enabled() and any(each.requires_grad for each in (query, keys, values)))
    if plain and _only_sinks(terms) and valid is None and can_split(query, values) and not faster_here(query):
        return chunk_attention(query, keys, values, scale=scale, terms=terms)
    if terms is not None or (plain and (faster_here(query) or _uneven(keys, values))):
        return causal_attention(query, keys, values, scale=scale, valid=valid, terms=terms)
    if new == length and valid is None:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1)
    if plain and valid is None and can_split(query, values):
        return chunk_attention(query, keys, values, scale=scale)
    if query.is_cuda and valid is None and query.element_size() == 2:
        # Flash attention aligns the causal mask to the last entry and needs none in memory.
        last_ones = causal_lower_right(new, length)
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=last_ones, scale=scale, enable_gqa=groups > 1
        )
    masks = 1 if valid is None else batch * query_heads
    block = max(16, min(1024, _MASK_ELEMENTS // (masks * length)))
    parts = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = length - new + last
        own = torch.arange(length - new + first, seen, device=query.device)[:, None]
        slots = torch.arange(seen, device=query.device)
        mask = (slots <= own)[None, None]
        if valid is not None:
            real = valid[:, :, None, :seen].repeat_interleave(groups, 1)
            mask = (mask & real) | (slots == own)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=groups > 1,
            )
        )
    return torch.cat(parts, 2)


def _uneven(keys: Tensor, values: Tensor) -> bool:
    """Tell that torch's fused CPU kernel does not take them: it wants values as wide as keys, and else holds N x N."""
    return keys.device.type == "cpu" and keys.shape[-1] != values.shape[-1]


def _only_sinks(terms: AttentionTerms | None) -> bool:
    """Tell that a path whose log-sum-exp is known can follow these terms."""
    return terms is not None and terms.softcap is None


def _one_token(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, valid: Tensor | None, terms: AttentionTerms | None
) -> Tensor:
    """dense_attention of a single token, which sees all valid entries."""
    batch, query_heads, _, dim = query.shape
    heads, length = keys.shape[1], keys.shape[2]
    groups = query_heads // heads
    if kernels.usable(query, keys, values):
        return kernels.decode_attention(query, keys, values, scale=scale, valid=valid, terms=terms)
    thin = faster_for_token(query, length) or (length >= LONG and _uneven(keys, values))
    products = terms is not None or (thin and query.dtype == torch.float32)
    if not products and native.serves(query, keys, values, batch * heads):
        return native.token_attention(query, keys, values, scale=scale, valid=valid)
    # The query heads of a group become the rows of one query block: keys are read once per KV head.
    packed = query.reshape(batch, heads, groups, dim)
    mask = None
    if valid is not None:
        mask = valid[:, :, None, :].clone()
        mask[..., -1] = True
    if terms is not None and _only_sinks(terms) and mask is None and can_split(query, values) and not thin:
        out = token_attention(packed, keys, values, scale=scale, terms=terms)
    elif terms is not None or thin:
        out = single_query_attention(packed, keys, values, mask, scale=scale, terms=terms)
    else:
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, query_heads, 1, values.shape[-1])


def _rows_alone(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, valid: Tensor, terms: AttentionTerms | None
) -> Tensor:
    """Attend row by row over the real entries only: no masks, and padding costs nothing."""
    batch, query_heads, new, _ = query.shape
    out = query.new_empty(batch, new, query_heads, values.shape[-1]).transpose(1, 2)
    reals, shown = valid[:, 0], valid[:, 0, -new:]
    # How many are real, and the first of them: read at once, since the host waits for it.
    facts = torch.stack([each for part in (reals, shown) for each in (part.sum(-1), part.to(torch.uint8).argmax(-1))])
    for row, (stored, first, fresh, begin) in enumerate(facts.T.tolist()):
        # Padding sees itself.
        out[row] = values[row, :, -new:].repeat_interleave(query_heads // keys.shape[1], 0)
        if not fresh:
            continue
        at = slice(begin, new) if begin + fresh == new else shown[row].nonzero()[:, 0]
        places = slice(first, None) if first + stored == keys.shape[2] else reals[row]
        mine, theirs = (part[row, :, places] for part in (keys, values))
        asked = query[row, :, at]
        out[row, :, at] = dense_attention(asked[None], mine[None], theirs[None], scale=scale, terms=terms)[0]
    return out


def real_entries(part: Tensor, real: Tensor) -> Tensor:
    """Take the entries of [heads, L, D] where `real`; a view where those are the last ones."""
    count = int(real.sum())
    if bool(real[-count:].all()):
        return part[:, -count:]
    return part[:, real]
