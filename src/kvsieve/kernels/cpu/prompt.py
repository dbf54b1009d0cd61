"""Python interface of the C kernels for attention of a prompt and of a few tokens, with AVX-512 BF16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import address_of, function, threaded
from kvsieve.kernels.inputs import PromptGrid, Queries

# Entries that the kernel processes at a time; see prompt.c.
_TILE = 128
# Queries of a KV head that the kernel of few tokens takes, and those from which on it is faster than token.c.
_FEW = 128
_SEVERAL = 3
# Sizes of blocks, and channels of keys and values, are multiples of these.
_BLOCK = 64
_KEY = 2
_VALUE = 16


class _PromptFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "lists", "counts", "sinks")),
        *((name, c_void_p) for name in ("pairs", "scratch")),
        *((f"{part}_{name}", c_int64) for part in ("query", "key", "value") for name in ("row", "head", "slot")),
        *((name, c_int64) for name in ("batch", "query_heads", "heads", "sets", "fresh", "length", "pad", "queries")),
        *((name, c_int64) for name in ("block", "query_blocks", "listed", "dim", "wide", "places")),
        *((name, c_float) for name in ("scale", "cap")),
        ("marks", c_void_p),
        *((name, c_int64) for name in ("mark_row", "mark_head", "item")),
    )


def takes(query: Tensor, values: Tensor, grid: PromptGrid, scale: float) -> bool:
    """Return whether the kernel supports these: bfloat16, in sizes that fill whole vectors."""
    half = query.dtype == values.dtype == torch.bfloat16 and scale > 0
    return half and grid.block % _BLOCK == 0 and query.shape[-1] % _KEY == 0 and values.shape[-1] % _VALUE == 0


def why_not_few(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> str | None:
    """Return the reason why the kernel of a few tokens does not take these, all entries real; None where it does."""
    if not (query.is_cpu and query.dtype == keys.dtype == values.dtype == torch.bfloat16 and scale > 0):
        return "it is for CPUs, in bfloat16"
    queries = query.shape[1] // keys.shape[1] * query.shape[2]
    if not _SEVERAL <= queries <= _FEW:
        return f"a KV head has {queries} queries, not {_SEVERAL} to {_FEW}"
    if query.shape[-1] % _KEY or values.shape[-1] % _VALUE:
        return "channels make no whole vectors"
    return reason()


@functools.cache
def reason() -> str | None:
    """Return why the kernel does not run on this machine, or None if it does; compiles it if needed."""
    found = threaded("prompt")
    if found.loaded is None:
        return found.reason
    return None if _kernels()[2](byref(_PromptFields(dim=_KEY, wide=_VALUE))) else "the compiler has no AVX-512 BF16"


def block_attention(
    asked: Queries, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, grid: PromptGrid
) -> Tensor:
    """Attend causally from the last L of N entries to chosen blocks and the diagonal.

    Arguments and result as in `kernels.blocks.block_attention`.
    """
    batch, query_heads, new, dim = asked.query.shape
    heads = keys.shape[1]
    wide = values.shape[-1]
    query, keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in (asked.query, keys, values))
    before = grid.pad + grid.length - new
    places = -(-(before + (grid.query_blocks - 1) * grid.queries + -(-grid.queries // _TILE) * _TILE) // _TILE) * _TILE
    sinks = None if asked.sinks is None else asked.sinks.float().contiguous()
    out = query.new_empty(batch, new, query_heads, wide)
    pairs = query.new_empty(batch * heads * places * (dim + wide))
    strides = (*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3])
    fields = _PromptFields(
        *(tensor.data_ptr() for tensor in (query, keys, values, out, lists, counts)),
        None if sinks is None else sinks.data_ptr(),
        pairs.data_ptr(),
        None,
        *strides,
        *(batch, query_heads, heads, counts.shape[1], new, grid.length, grid.pad, grid.queries),
        *(grid.block, grid.query_blocks, lists.shape[-1], dim, wide, places),
        asked.scale,
        asked.softcap or 0.0,
    )
    threads = torch.get_num_threads()
    scratch = torch.empty(_kernels()[2](byref(fields)) * threads, dtype=torch.uint8)
    fields.scratch = scratch.data_ptr()
    _kernels()[0](byref(fields), threads)
    return out.transpose(1, 2)


def few_attention(asked: Queries, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention of the last few of N entries over all N; all queries of a KV head meet its keys at once.

    Args:
        asked: queries [B, Hq, L, D], as `why_not_few` takes them.
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        bias: [B, H, N], 0 for a head's own entries, the last L of which are the queries'; None: all are its own.

    Returns:
        [B, Hq, L, Dv].
    """
    batch, query_heads, new, dim = asked.query.shape
    query, keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in (asked.query, keys, values))
    sinks = None if asked.sinks is None else asked.sinks.float().contiguous()
    out = query.new_empty(batch, new, query_heads, values.shape[-1])
    fields = _PromptFields(
        *(tensor.data_ptr() for tensor in (query, keys, values, out)),
        sinks=None if sinks is None else sinks.data_ptr(),
        batch=batch,
        query_heads=query_heads,
        heads=keys.shape[1],
        fresh=new,
        length=keys.shape[2],
        dim=dim,
        wide=values.shape[-1],
        scale=asked.scale,
        cap=asked.softcap or 0.0,
    )
    for name, part in (("query", query), ("key", keys), ("value", values)):
        for dimension, stride in zip(("row", "head", "slot"), part.stride(), strict=False):
            setattr(fields, f"{name}_{dimension}", stride)
    if bias is not None:
        fields.marks, fields.mark_row, fields.mark_head = bias.data_ptr(), *bias.stride()[:2]
        fields.item = bias.element_size()
    if not _kernels()[1](byref(fields), torch.get_num_threads()):
        raise MemoryError(f"there is no memory for attention to {keys.shape[2]} entries")
    return out.transpose(1, 2)


@functools.cache
def few_address() -> int:
    """Return the address of the kernel of a few tokens for token.c."""
    return address_of(function("prompt", "attend_few", c_void_p, c_int64, returns=c_int64))


@functools.cache
def _kernels() -> tuple[Callable[..., None], Callable[..., int], Callable[..., int]]:
    """Return the C functions for blocks of a prompt, for few tokens, and for the bytes of scratch per thread."""
    needed = function("prompt", "scratch_of", c_void_p, returns=c_int64)
    return function("prompt", "read_blocks"), function("prompt", "read_few", c_void_p, c_int64, returns=c_int64), needed
