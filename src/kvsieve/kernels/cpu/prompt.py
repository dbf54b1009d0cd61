"""Python interface of the C kernel for a prompt's attention over chosen key blocks, with AVX-512 BF16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import function, threaded
from kvsieve.kernels.inputs import PromptGrid, Terms

# Entries that the kernel processes at a time; see prompt.c.
_TILE = 128
# Sizes of blocks, and channels of keys and values, are multiples of these.
_BLOCK, _KEY, _VALUE = 64, 2, 16


class _PromptFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "out", "lists", "counts", "sinks")),
        *((name, c_void_p) for name in ("pairs", "scratch")),
        *((f"{part}_{name}", c_int64) for part in ("query", "key", "value") for name in ("row", "head", "slot")),
        *((name, c_int64) for name in ("batch", "query_heads", "heads", "sets", "fresh", "length", "pad", "queries")),
        *((name, c_int64) for name in ("block", "query_blocks", "listed", "dim", "wide", "places")),
        *((name, c_float) for name in ("scale", "cap")),
    )


def takes(query: Tensor, values: Tensor, grid: PromptGrid, scale: float) -> bool:
    """Return whether the kernel supports these: bfloat16, in sizes that fill whole vectors."""
    half = query.dtype == values.dtype == torch.bfloat16 and scale > 0
    return half and grid.block % _BLOCK == 0 and query.shape[-1] % _KEY == 0 and values.shape[-1] % _VALUE == 0


@functools.cache
def reason() -> str | None:
    """Return why the kernel does not run on this machine, or None if it does; compiles it if needed."""
    found = threaded("prompt")
    if found.loaded is None:
        return found.reason
    return None if _kernels()[1](byref(_PromptFields(dim=_KEY, wide=_VALUE))) else "the compiler has no AVX-512 BF16"


def block_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lists: Tensor,
    counts: Tensor,
    grid: PromptGrid,
    *,
    scale: float,
    terms: Terms | None = None,
) -> Tensor:
    """Attend causally from the last L of N entries to chosen blocks and the diagonal.

    Arguments and result as in `kernels.blocks.block_attention`.
    """
    batch, query_heads, new, dim = query.shape
    heads, wide = keys.shape[1], values.shape[-1]
    query, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values))
    before = grid.pad + grid.length - new
    places = -(-(before + (grid.query_blocks - 1) * grid.queries + -(-grid.queries // _TILE) * _TILE) // _TILE) * _TILE
    sinks = None if terms is None or terms.sinks is None else terms.sinks.float().contiguous()
    cap = None if terms is None else terms.softcap
    out = query.new_empty(batch, new, query_heads, wide)
    pairs = query.new_empty(batch * heads * places * (dim + wide))
    strides = (*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3])
    fields = _PromptFields(
        *(each.data_ptr() for each in (query, keys, values, out, lists, counts)),
        None if sinks is None else sinks.data_ptr(),
        pairs.data_ptr(),
        None,
        *strides,
        *(batch, query_heads, heads, counts.shape[1], new, grid.length, grid.pad, grid.queries),
        *(grid.block, grid.query_blocks, lists.shape[-1], dim, wide, places),
        scale,
        cap or 0.0,
    )
    read, needed = _kernels()
    threads = torch.get_num_threads()
    scratch = torch.empty(needed(byref(fields)) * threads, dtype=torch.uint8)
    fields.scratch = scratch.data_ptr()
    read(byref(fields), threads)
    return out.transpose(1, 2)


@functools.cache
def _kernels() -> tuple[Callable[..., None], Callable[..., int]]:
    return function("prompt", "read_blocks"), function("prompt", "scratch_of", c_void_p, returns=c_int64)
