"""Calling the C kernel that attends over encoded entries."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import library


class _PackedPart(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("packed", "scale", "zero", "levels", "places", "extra")),
        *((name, c_int64) for name in ("bits", "bytes", "dim", "group", "apart")),
    )


class _Job(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "base", "table", "fills", "acc", "top", "sum")),
        *((name, c_int64) for name in ("rows", "per_row", "groups", "tokens", "splits")),
        ("cap", c_float),
    )


def reason() -> str | None:
    """Reason why the kernel does not run on this machine; None where it does."""
    return library().reason


def attend(
    query: Tensor,
    base: Tensor | None,
    table: Tensor,
    fills: Tensor,
    tokens: int,
    parts: tuple[dict[str, Any], dict[str, Any]],
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one token over encoded entries, not yet divided by the sum of its weights.

    Args:
        query: float32 [R, G, D], scaled, and turned as the keys are.
        base: float32 [R, G], added to every logit of a query; None for nothing.
        table: int64 [R, M], blocks of each KV row.
        fills: int64 [R, M], entries of each block.
        tokens: T, places of a block.
        parts: of keys and values: the tensors of their Codes, `levels` (float32, 16 or more) or None, bits, dim, group.
        cap: of logits; None for none.

    Returns:
        Sums [R, S, G, Dv] of values by weight, the largest logit [R, S, G], and the sums [R, S, G] of weights, which
        are relative to that: S parts of each KV row's entries, to be added up.
    """
    rows, groups, _ = query.shape
    per_row, wide = table.shape[1], parts[1]["dim"]
    # Every thread has something to do at the end, too.
    splits = max(1, min(per_row, -(-4 * torch.get_num_threads() // rows)))
    query, table, fills = query.contiguous(), table.contiguous(), fills.contiguous()
    acc = query.new_empty(rows, splits, groups, wide)
    top, total = query.new_empty(rows, splits, groups), query.new_empty(rows, splits, groups)
    job = _Job(
        *(
            _address(part)
            for part in (query.contiguous(), base, table.contiguous(), fills.contiguous(), acc, top, total)
        ),
        rows,
        per_row,
        groups,
        tokens,
        splits,
        cap or 0.0,
    )
    found = library().loaded
    assert found is not None
    run = found.packed_attention
    run.argtypes = (POINTER(_Job), POINTER(_PackedPart), POINTER(_PackedPart))
    if run(byref(job), byref(_part(parts[0])), byref(_part(parts[1]))):
        raise MemoryError("attention over encoded entries could not allocate its scratch, less than a MiB per thread")
    return acc, top, total


def _part(told: dict[str, Any]) -> _PackedPart:
    packed, places = told["packed"], told["places"]
    return _PackedPart(
        *(_address(told[name]) for name in ("packed", "scale", "zero", "levels", "places", "extra")),
        told["bits"],
        packed.shape[2],
        told["dim"],
        told["group"],
        0 if places is None else places.shape[1],
    )


def _address(part: Tensor | None) -> int | None:
    return None if part is None else ctypes.c_void_p(part.data_ptr()).value
