"""Attention of new tokens over entries that heads keep in different numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention.blocked import single_query_attention
from kvsieve.attention.request import AttentionRequest, Executor, FlatEntries, why_not_plain
from kvsieve.kernels.cpu import prompt as few
from kvsieve.kernels.cpu import token as native
from kvsieve.kernels.cpu.cores import asked_threads
from kvsieve.types import AttentionQueries

# Slots below which a part of its own is not worth a thread.
_LEAST = 256

_Request = AttentionRequest[FlatEntries, None]


def _why_not_triton(request: _Request) -> str | None:
    stored = request.stored
    return kernels.why_not(request.asked.query, stored.keys, stored.values, stored.bias)


def _triton(request: _Request) -> Tensor:
    stored = request.stored
    bias = stored.bias
    if stored.log_weight is not None:
        bias = bias.float() + stored.log_weight[:, None]
    return kernels.ragged_decode(request.asked, stored.keys, stored.values, bias, stored.used)


def _why_not_few(request: _Request) -> str | None:
    query = request.asked.query
    stored = request.stored
    if stored.foreseen is not None:
        return "a compiled pass cannot call it"
    if stored.padded:
        return "some tokens are padding"
    if stored.log_weight is not None:
        return "entries have weights"
    if torch.is_grad_enabled() and query.requires_grad:
        return "a gradient is wanted"
    return few.why_not_few(query, *_used(stored)[:2], request.asked.scale)


def _few(request: _Request) -> Tensor:
    return few.few_attention(request.asked, *_used(request.stored))


def _used(stored: FlatEntries) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values of the slots in use as all heads see them, [B, H, N, ...], and the bias there."""
    heads = stored.bias.shape[1]
    keys, values = (part[:, None, : stored.used].expand(-1, heads, -1, -1) for part in (stored.keys, stored.values))
    return keys, values, stored.bias[:, :, : stored.used]


def _why_not_c(request: _Request) -> str | None:
    stored = request.stored
    if (reason := why_not_plain(request)) is not None:
        return reason
    if stored.foreseen is not None:
        return "it asks for threads, which a compiled pass cannot"
    rows = stored.bias.shape[0] * stored.bias.shape[1]
    return native.why_not(request.asked.query, stored.keys, stored.values, rows, stored.log_weight)


def _c(request: _Request) -> Tensor:
    stored = request.stored
    return native.ragged_token_attention(
        request.asked.query,
        stored.keys,
        stored.values,
        stored.bias,
        scale=request.asked.scale,
        used=stored.used,
        log_weight=stored.log_weight,
    )


def _products(request: _Request) -> Tensor:
    """Attend with a row of products for each token."""
    asked = request.asked
    stored = request.stored
    query = asked.query.transpose(1, 2)
    new, query_heads = query.shape[1:3]
    own = stored.shown(new).repeat_interleave(query_heads // stored.bias.shape[1], 1).transpose(1, 2)
    sinks = None if asked.sinks is None else asked.sinks.repeat(new)
    rows = AttentionQueries(query, asked.scale, asked.softcap, sinks)
    weights = None if stored.log_weight is None else stored.log_weight[:, None, None]
    return single_query_attention(rows, stored.keys[:, None], stored.values[:, None], own, weights).transpose(1, 2)


def _torch(request: _Request) -> Tensor:
    """Attend by one call for all heads and tokens.

    A head's queries meet the other heads' entries too and are masked there, which costs arithmetic that decoding
    has to spare, and reads every key and value once. torch gives such a call one thread per row, so on a CPU the buffer
    is cut into as many equal parts as there are threads, merged by their log-sum-exp.
    """
    stored = request.stored
    query = request.asked.query
    batch, query_heads, new, dim = query.shape
    heads, slots = stored.bias.shape[1:]
    threads = asked_threads() if stored.foreseen is None else stored.foreseen.threads
    parts = _parts(batch, slots, threads) if query.device.type == "cpu" and dim == stored.values.shape[-1] else 1
    packed = query.reshape(batch, 1, query_heads * new, dim).expand(-1, parts, -1, -1)
    keys, values = (part.unflatten(1, (parts, -1)) for part in (stored.keys, stored.values))
    bias = stored.bias[:, :, None]
    if stored.log_weight is not None:
        bias = bias + stored.log_weight[:, None, None].to(bias.dtype)
    if new > 1:
        bias = bias.masked_fill(~stored.shown(new), torch.finfo(bias.dtype).min)
    mask = bias.repeat_interleave(query_heads // heads, 1).flatten(1, 2).unflatten(2, (parts, -1)).transpose(1, 2)
    if parts == 1:
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=request.asked.scale)
    else:
        out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            packed, keys, values, attn_mask=mask, scale=request.asked.scale
        )
        out = (out * norm.softmax(1)[..., None]).sum(1).to(out.dtype)
    return out.reshape(batch, query_heads, new, stored.values.shape[-1])


def _parts(batch: int, slots: int, threads: int) -> int:
    """Number of parts that each row is cut into: a power of two that divides `slots`."""
    wanted = min(-(-threads // batch), slots // _LEAST)
    parts = 1
    while parts * 2 <= wanted and slots % (parts * 2) == 0:
        parts *= 2
    return parts


FLAT_KERNEL = Executor("C", _why_not_c, _c)
FLAT_FEW = Executor("C, few tokens", _why_not_few, _few)
FLAT = (
    Executor("Triton", _why_not_triton, _triton),
    FLAT_FEW,
    FLAT_KERNEL,
    Executor("products", lambda request: "torch's kernel is faster" if request.asked.is_plain else None, _products),
    Executor("torch", why_not_plain, _torch),
)
