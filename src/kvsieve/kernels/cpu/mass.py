"""Python interface of the C kernel for attention mass, for processors with AVX-512 BF16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int64, c_void_p

from kvsieve.kernels.cpu.build import function, threaded
from kvsieve.kernels.inputs import Queries
from kvsieve.lazy import Tensor, torch

# Entries per product, see mass.c; least number of queries for which it pays to lay out all keys.
_TILE = 64
_LEAST = 4


class _MassFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "visible", "weights", "sinks", "out", "norms", "pairs")),
        *((f"{part}_{name}", c_int64) for part in ("query", "key") for name in ("row", "head", "slot")),
        *((f"{part}_{name}", c_int64) for part in ("visible", "weight") for name in ("row", "head", "slot")),
        *((name, c_int64) for name in ("batch", "query_heads", "heads", "count", "length", "entries", "dim", "most")),
        *((name, c_float) for name in ("scale", "cap")),
    )


def takes(query: Tensor, keys: Tensor, scale: float) -> bool:
    """Return whether the kernel supports these tensors: bfloat16 on a CPU that multiplies it, channels in pairs."""
    half = query.dtype == keys.dtype == torch.bfloat16 and query.device.type == keys.device.type == "cpu"
    sized = query.shape[2] >= _LEAST and query.shape[-1] % 2 == 0 and scale > 0
    return half and sized and reason() is None


@functools.cache
def reason() -> str | None:
    """Return why the kernel does not run on this machine, or None if it does; compiles it if needed."""
    found = threaded("mass")
    if found.loaded is None:
        return found.reason
    return None if found.loaded.has_half() else "the compiler has no AVX-512 BF16"


def query_mass(
    asked: Queries,
    keys: Tensor,
    visible: Tensor,
    *,
    weights: Tensor | None = None,
    largest: bool = False,
    entries: int | None = None,
) -> Tensor:
    """Return the softmax attention of T queries over N entries, reduced over the queries.

    Arguments as in `core.queries.query_mass`, of a dtype and size that `takes` accepts.

    largest: reduce by the maximum, not the sum.

    Returns:
        float32 [B, Hq, entries].
    """
    batch, query_heads, count, dim = asked.query.shape
    heads = keys.shape[1]
    length = keys.shape[2]
    entries = length if entries is None else entries
    query, keys = (_in_pairs(part) for part in (asked.query, keys))
    # Only dimensions that differ between entries have to be adjacent in memory.
    visible = visible if visible.stride(-1) == 1 and visible.shape[-1] == length else _spread(visible, length)
    visible = visible.expand(batch, heads, count, length)
    weights = None if weights is None else weights.float().expand(batch, heads, count)
    sinks = None if asked.sinks is None else asked.sinks.float().contiguous()
    out, norms = query.new_empty(batch * query_heads * (entries + count), dtype=torch.float32).split(
        (batch * query_heads * entries, batch * query_heads * count)
    )
    pairs = query.new_empty(batch * heads * -(-length // _TILE) * _TILE * dim)
    fields = _MassFields(
        *(None if tensor is None else tensor.data_ptr() for tensor in (query, keys, visible, weights, sinks)),
        *(tensor.data_ptr() for tensor in (out, norms, pairs)),
        *(*query.stride()[:3], *keys.stride()[:3], *visible.stride()[:3]),
        *((0, 0, 0) if weights is None else weights.stride()),
        *(batch, query_heads, heads, count, length, entries, dim, largest),
        asked.scale,
        asked.softcap or 0.0,
    )
    _kernel()(byref(fields), torch.get_num_threads())
    return out.view(batch, query_heads, entries)


def _in_pairs(part: Tensor) -> Tensor:
    """Return rows of adjacent channels, each an even number of channels from the next."""
    return part if part.stride(-1) == 1 and part.stride(-2) % 2 == 0 else part.contiguous()


def _spread(visible: Tensor, length: int) -> Tensor:
    return visible.expand(*visible.shape[:-1], length).contiguous()


@functools.cache
def _kernel() -> Callable[..., None]:
    return function("mass", "query_mass")
