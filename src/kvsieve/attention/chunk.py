"""Attention of a chunk of a prompt on a CPU as two calls of torch's fused kernel, which needs no mask for either."""

from __future__ import annotations

import torch
from torch import Tensor


def can_split(query: Tensor, values: Tensor) -> bool:
    """Tell whether the fused CPU kernel takes these tensors."""
    return query.device.type == "cpu" and query.shape[-1] == values.shape[-1] and not query.requires_grad


def chunk_attention(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """Causal attention of the last L of N real entries over all N, L below N; arguments as in `dense_attention`.

    The earlier N - L entries are seen by every query, the last L causally; the two are merged by their log-sum-exp.
    Under a mask the kernel would also compute what is hidden (benchmarks/attention.py has the times).
    """
    batch, query_heads, new, dim = query.shape
    heads, before = keys.shape[1], keys.shape[2] - new
    groups = query_heads // heads
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # The query heads of a group are rows of one block, so the many earlier keys are not repeated.
    rows = query.reshape(batch, heads, groups * new, dim)
    earlier, norm = attend(rows, keys[:, :, :before], values[:, :, :before], scale=scale)
    late_keys, late_values = (part[:, :, before:].repeat_interleave(groups, 1) for part in (keys, values))
    late, late_norm = attend(query, late_keys, late_values, is_causal=True, scale=scale)
    share = torch.sigmoid(norm.reshape(late_norm.shape) - late_norm)[..., None]
    out: Tensor = late + share * (earlier.reshape(late.shape) - late)
    return out.to(query.dtype)
