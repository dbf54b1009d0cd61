"""Python interface of the C kernel for sparse attention: it chooses entries of KV rows, gathers them and attends."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from ctypes import Array, Structure, addressof, byref, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, function, library

DTYPES = (torch.float32, torch.bfloat16)
# Scratch per Python thread, shared by all layers: several threads may generate at once.
_OWN = threading.local()


class RowFields(Structure):
    """A KV row, as in reading.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "body", "table", "sum", "map")),
        *((name, c_int64) for name in ("kept", "tail", "stride", "size", "capacity")),
        *((name, c_int64) for name in ("page", "channels", "count", "take", "number", "mapped", "place")),
    )


class _JobFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "out", "sinks", "rows", "given", "noted")),
        ("scratch", c_void_p),
        *((name, c_int64) for name in ("count", "more", "groups", "dim", "wide", "newest", "half", "bytes", "fresh")),
        ("listed", c_int64),
        *((name, c_float) for name in ("scale", "cap")),
    )


class RowJob:
    """The KV rows of a layer, for repeated sparse attention.

    Args:
        count: KV rows.
        groups: query heads of each.
        dim: channels of a key.
        wide: channels of a value.
        newest: always read the newest page.
        dtype: of queries, keys, values and page tables: one of DTYPES.

    Attributes:
        rows: one per KV row, filled in by the caller.
    """

    def __init__(self, count: int, groups: int, dim: int, wide: int, *, newest: bool, dtype: torch.dtype) -> None:
        self.rows: Array[RowFields] = (RowFields * count)()
        self._shape = (count, groups)
        self._wide = wide
        self._bytes = 0
        self._fields = _JobFields(count=count, groups=groups, dim=dim, wide=wide, newest=newest)
        self._fields.rows = addressof(self.rows)
        self._fields.half = dtype == torch.bfloat16
        self._reference = byref(self._fields)

    def run(
        self,
        query: Tensor,
        more: int,
        scale: float,
        cap: float | None = None,
        sinks: Tensor | None = None,
        given: Tensor | None = None,
        noted: Tensor | None = None,
    ) -> Tensor:
        """Attend to all KV rows for the last tokens, one after another.

        Args:
            query: [X, G, L, D], contiguous.
            more: entries of each KV row beyond the `size` filled in, the L tokens' own included.
            scale: factor of query-key products.
            cap: of logits; None for none.
            sinks: float32 [X, G], contiguous; None for none.
            given: int64 [X', L, k], contiguous: entries that rows with a `place` there read; None: they choose.
            noted: int64 [X', L, k], contiguous: gets the entries that rows choose, at their `place`; None: not noted.

        Returns:
            [X, G, L, Dv], the only allocation.
        """
        fields = self._fields
        threads = torch.get_num_threads()
        new = query.shape[-2]
        out = query.new_empty(*self._shape, new, self._wide)
        fields.query, fields.out = query.data_ptr(), out.data_ptr()
        fields.sinks = None if sinks is None else sinks.data_ptr()
        fields.given = None if given is None else given.data_ptr()
        fields.noted = None if noted is None else noted.data_ptr()
        lists = given if given is not None else noted
        fields.listed = 0 if lists is None else lists.shape[-1]
        fields.more = more
        fields.fresh = new
        fields.scale = scale
        fields.cap = cap or 0.0
        while True:
            scratch = _scratch(self._bytes * threads)
            fields.scratch, fields.bytes = scratch.data_ptr(), scratch.numel() // threads // 64 * 64
            if not _kernels()[0](self._reference, threads):
                return out
            # Rows have grown: an eighth to spare makes this rare.
            self._bytes = -(-_kernels()[1](self._reference) * 9 // 8 // 64) * 64


def built() -> Library:
    return library("reading")


def _scratch(size: int) -> Tensor:
    """Return at least `size` bytes, aligned to a cache line."""
    scratch: Tensor | None = getattr(_OWN, "scratch", None)
    if scratch is None or scratch.numel() < size:
        whole = torch.zeros(max(size, 1 << 16) + 64, dtype=torch.uint8)
        start = -whole.data_ptr() % 64
        scratch = _OWN.scratch = whole[start : start + whole.numel() - 64]
    return scratch


@functools.cache
def _kernels() -> tuple[Callable[..., int], Callable[..., int]]:
    read = function("reading", "read_rows", c_void_p, c_int64, returns=c_int)
    return read, function("reading", "scratch_of", c_void_p, returns=c_int64)
