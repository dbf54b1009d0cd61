"""Python interface of the C kernel for attention over encoded entries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import function, library
from kvsieve.kernels.cpu.cores import asked_threads

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _PackedFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("packed", "scale", "zero", "levels", "places", "extra")),
        *((name, c_int64) for name in ("bits", "bytes", "dim", "group", "apart")),
    )


class _ExactFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "real")),
        *((name, c_int64) for name in ("size", "key_row", "value_row", "kind", "fresh")),
    )


class _Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "base", "exactly", "table", "fills")),
        *((name, c_void_p) for name in ("sinks", "acc", "top", "sum", "out")),
        *((name, c_int64) for name in ("rows", "per_row", "groups", "tokens", "splits", "dim", "wide")),
        ("cap", c_float),
        ("narrow", c_int64),
    )


class PackedPart:
    """Addresses of encoded keys or values, valid while these tensors exist.

    Args:
        parts: tensors of `core.codes.Codes` by name, or None.
        levels: float32, 16 of them or more; None where a number is the code itself.
        bits: per code.
        dim: channels.
        group: channels that share a scale; 0 for a scale per channel.
    """

    def __init__(self, parts: dict[str, Tensor | None], levels: Tensor | None, bits: int, dim: int, group: int) -> None:
        packed = parts["packed"]
        places = parts["places"]
        assert packed is not None
        self.held = parts, levels
        addresses = (_address(parts[name]) for name in ("packed", "scale", "zero"))
        apart = 0 if places is None else places.shape[1]
        self.fields = _PackedFields(
            *addresses,
            _address(levels),
            _address(places),
            _address(parts["extra"]),
            *(bits, packed.shape[2], dim, group, apart),
        )


@dataclass(frozen=True)
class AskedBlocks:
    """Encoded entries of R KV rows, and the queries that attend to them.

    Attributes:
        query: float32 [R, G, D], scaled, and rotated as the keys are.
        base: float32 [R, G], added to every logit of a query; None for nothing.
        table: int64 [R, M], blocks of each KV row.
        fills: int64 [R, M], entries of each block.
        keys: the pool of blocks.
        values: the pool of blocks.
        narrow: queries and weights may be rounded to bfloat16, which a processor multiplies in pairs.
    """

    query: Tensor
    base: Tensor | None
    table: Tensor
    fills: Tensor
    keys: PackedPart
    values: PackedPart
    narrow: bool = False


@dataclass(frozen=True)
class AskedExact:
    """Exact entries of R KV rows, and the queries that attend to them.

    Attributes:
        query: float32 [R, G, D], scaled.
        keys: [B, H, size, D], possibly a view of a larger buffer.
        values: [B, H, size, Dv], possibly a view of a larger buffer.
        real: bool [R, size], False for entries that only their own query sees; None if there are none.
        fresh: new tokens, whose entries are the last ones. A head's queries, one of each, follow each other.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    real: Tensor | None
    fresh: int = 1


def reason() -> str | None:
    """Return why the kernel does not run on this machine, or None if it does."""
    return library("packed").reason


def attend(
    encoded: AskedBlocks | None,
    exact: AskedExact | None,
    *,
    tokens: int,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over encoded and exact entries; one of the two may be None.

    Args:
        encoded: encoded entries.
        exact: entries of a KV row that are not encoded.
        tokens: T, entries of a full block.
        cap: of logits; None for none.
        sinks: float32 [R, G], logits in the softmax without a value; None for none.

    Returns:
        [R, G, Dv].
    """
    shape = _shape(encoded, exact)
    out = torch.empty(shape[0], shape[1], shape[3])
    _run(encoded, exact, shape, tokens, cap, (sinks, out))
    return out


def attend_in_parts(
    encoded: AskedBlocks | None, exact: AskedExact | None, *, tokens: int, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in S parts of each KV row's entries, for the caller to merge; see `attend`.

    Returns:
        Sums [R, S, G, Dv] of values by weight, the largest logit [R, S, G], and the sums [R, S, G] of weights relative
        to it.
    """
    return _run(encoded, exact, _shape(encoded, exact), tokens, cap, (None, None))


def _shape(encoded: AskedBlocks | None, exact: AskedExact | None) -> tuple[int, int, int, int]:
    if encoded is not None:
        rows, groups, dim = encoded.query.shape
        return rows, groups, dim, encoded.values.fields.dim
    assert exact is not None
    rows, groups, dim = exact.query.shape
    return rows, groups, dim, exact.values.shape[3]


def _run(
    encoded: AskedBlocks | None,
    exact: AskedExact | None,
    shape: tuple[int, int, int, int],
    tokens: int,
    cap: float | None,
    ends: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel. ends: sinks and output tensor; None for neither."""
    rows, groups, dim, wide = shape
    per_row = 0
    splits = 0
    inputs: list[Tensor | None] = [None] * 5
    if encoded is not None:
        per_row = encoded.table.shape[1]
        # Keeps every thread busy until the end.
        splits = max(1, min(per_row, -(-4 * asked_threads() // rows)))
        inputs = [encoded.query, encoded.base, None, encoded.table, encoded.fills]
    if exact is not None:
        splits += 1
        inputs[2] = exact.query
    tensors = [None if part is None else part.contiguous() for part in (*inputs, ends[0])]
    acc = torch.empty(rows, splits, groups, wide)
    top, total = torch.empty(2, rows, splits, groups)
    job = _Job(
        *map(_address, (*tensors, acc, top, total, ends[1])),
        *(rows, per_row, groups, tokens, splits, dim, wide),
        cap or 0.0,
        encoded is not None and encoded.narrow,
    )
    exact_fields, kept = (None, None) if exact is None else _exact_part(exact)
    keys, values = (None, None) if encoded is None else (byref(encoded.keys.fields), byref(encoded.values.fields))
    if _kernel()(byref(job), keys, values, None if exact_fields is None else byref(exact_fields)):
        raise MemoryError("attention over encoded entries could not allocate its scratch, less than a MiB per thread")
    # The tensors had to stay alive until here.
    del tensors, kept
    return acc, top, total


def _exact_part(exact: AskedExact) -> tuple[_ExactFields, object]:
    """Return the addresses of exact entries, and an object that keeps them alive."""
    keys, values = (_rows(part) for part in (exact.keys, exact.values))
    real = None if exact.real is None else exact.real.contiguous()
    exact_fields = _ExactFields(
        *map(_address, (keys, values, real)),
        *(keys.shape[2], keys.stride(1), values.stride(1), _KINDS[keys.dtype], exact.fresh),
    )
    return exact_fields, (keys, values, real)


def _rows(part: Tensor) -> Tensor:
    """Return `part` with adjacent entries in memory and evenly spaced KV rows."""
    if part.dtype not in _KINDS:
        return part.float().contiguous()
    batch, heads, _, dim = part.shape
    lie = part.stride(3) == 1 and part.stride(2) == dim and (batch == 1 or part.stride(0) == heads * part.stride(1))
    return part if lie else part.contiguous()


@functools.cache
def _kernel() -> Callable[..., Any]:
    return function("packed", "packed_attention", *(c_void_p,) * 4, returns=c_int)


def _address(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()
