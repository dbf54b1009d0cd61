"""Python interface of the C kernel for attention of the last token, or few, over all stored entries, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, function, library
from kvsieve.kernels.cpu.cores import asked_threads

_DTYPES = (torch.float32, torch.bfloat16)
# From this many slots every thread should get a part.
_LONG = 1024
# Queries of several tokens that a part has at least; see token.c.
_FEWEST = 16


class TokenFields(Structure):
    """The job of token.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "seen", "weights", "out")),
        *((name, c_int64) for name in ("batch", "heads", "groups", "dim", "size", "row", "head")),
        *((name, c_int64) for name in ("item", "seen_row", "seen_head", "newest", "half", "fresh", "apart")),
        ("scale", c_float),
    )


def built() -> Library:
    return library("token")


def why_not(query: Tensor, keys: Tensor, values: Tensor, rows: int, log_weight: Tensor | None = None) -> str | None:
    """Return the reason why the kernel does not compute this, or not fast; None if it does.

    It does on a CPU, in one dtype of _DTYPES, without gradients, if entries are adjacent in memory.

    Args:
        query: [B, Hq, L, D].
        keys: [..., N, D].
        values: the same shape.
        rows: KV rows; each runs on one thread, or on several if L > 1 and it has many queries.
        log_weight: float32, of the slots of `keys`; None for none.
    """
    dtype = query.dtype
    if not (query.is_cpu and dtype in _DTYPES and keys.dtype == dtype and values.dtype == dtype):
        return "it is for CPUs, in float32 or bfloat16"
    if torch.is_grad_enabled() and query.requires_grad:
        return "a gradient is wanted"
    if (reason := built().reason) is not None:
        return reason
    if keys.shape[-2] >= _LONG and _parts(query, rows) < asked_threads():
        return "there are fewer KV rows than threads"
    apart = keys.stride()
    beside = apart == values.stride() and apart[-1] == 1 and apart[-2] == keys.shape[-1] == values.shape[-1]
    if beside and log_weight is not None:
        beside = log_weight.stride() == tuple(step // keys.shape[-1] for step in apart[:-1])
    return None if beside else "entries do not stand side by side"


def _parts(query: Tensor, rows: int) -> int:
    """Return the most parts that the kernel divides its work into."""
    batch, heads, new, _ = query.shape
    return rows if new == 1 else rows * max(batch * heads * new // rows // _FEWEST, 1)


def token_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    valid: Tensor | None = None,
    log_weight: Tensor | None = None,
) -> Tensor:
    """Attention of the last tokens, each over its own entry and all valid ones before it.

    Args:
        query: [B, Hq, L, D].
        keys: [B, H, N, D], the first entries of buffers in which a head's entries are adjacent; the last L are those
            of the tokens.
        values: [B, H, N, D], in buffers of the same size.
        scale: factor of the query-key products.
        valid: bool [B, H or 1, N], False for padding; None if there is none. With several tokens, theirs are real.
        log_weight: float32 [B, H, N], in a buffer with the slots of `keys`, added to the logits; None for nothing.

    Returns:
        [B, Hq, L, D].
    """
    batch, heads, size, dim = keys.shape
    fields = TokenFields(row=keys.stride(0) // dim, head=keys.stride(1) // dim, newest=1, apart=1)
    if valid is not None:
        fields.item, fields.seen, fields.seen_row = 1, valid.data_ptr(), valid.stride(0)
        fields.seen_head = valid.stride(1) if valid.shape[1] > 1 else 0
    fields.weights = None if log_weight is None else log_weight.data_ptr()
    return _run(fields, query, keys, values, (batch, heads, size), scale)


def ragged_token_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    *,
    scale: float,
    used: int | None = None,
    log_weight: Tensor | None = None,
) -> Tensor:
    """Attention of the last tokens over each head's entries of a flat buffer.

    Args:
        query: [B, Hq, L, D].
        keys: [B, T, D], all heads' entries; those of a token have H slots, after those of the token before it.
        values: [B, T, D].
        bias: [B, H, T] in the keys' dtype, 0 for a head's own entries.
        scale: factor of the query-key products.
        used: slots in use; the last L * H are those of the L tokens. None for T, if L is 1.
        log_weight: float32 [B, T], in a buffer with the slots of `keys`, added to the logits; None for nothing.

    Returns:
        [B, Hq, L, D]; 0 where a query sees nothing.
    """
    batch, heads, slots = bias.shape
    fields = TokenFields(row=keys.stride(0) // keys.shape[2], item=bias.element_size(), seen=bias.data_ptr())
    fields.seen_row, fields.seen_head, fields.apart = bias.stride(0), bias.stride(1), heads
    fields.weights = None if log_weight is None else log_weight.data_ptr()
    return _run(fields, query, keys, values, (batch, heads, slots if used is None else used), scale)


def _run(
    fields: TokenFields, query: Tensor, keys: Tensor, values: Tensor, shape: tuple[int, ...], scale: float
) -> Tensor:
    # As projections give them: token by token.
    query = query.transpose(1, 2).contiguous()
    out = torch.empty_like(query)
    fields.query, fields.keys, fields.values, fields.out = (part.data_ptr() for part in (query, keys, values, out))
    fields.batch, fields.heads, fields.size = shape
    fields.groups = query.shape[2] // shape[1]
    fields.fresh = query.shape[1]
    fields.dim = query.shape[3]
    fields.half = query.dtype == torch.bfloat16
    fields.scale = scale
    _kernel()(byref(fields), torch.get_num_threads())
    return out.transpose(1, 2)


@functools.cache
def _kernel() -> Callable[..., None]:
    return function("token", "attend")
