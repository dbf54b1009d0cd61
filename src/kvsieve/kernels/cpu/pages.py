"""Python interface of the C kernels of a paged cache: bounds of pages' keys, and the choice of the best pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import Library, function, library

DTYPES = (torch.float32, torch.bfloat16)


class _UpdateFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "slots", "bounds")),
        *((name, c_int64) for name in ("tokens", "apart", "heads", "dim", "size", "halves", "half")),
    )


class _ChoiceFields(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("bounds", "question", "table", "sizes", "counts", "chosen", "scratch")),
        *((name, c_int64) for name in ("requests", "width", "most", "heads", "groups", "dim", "page", "parts")),
        *((name, c_int64) for name in ("halves", "half", "bytes")),
    )


def built() -> Library:
    return library("pages")


def update_bounds(bounds: Tensor, keys: Tensor, slots: Tensor, size: int) -> None:
    """Update the bounds, or the sums, of pages with new keys.

    Args:
        bounds: [pages, heads, 2, dim] in one of DTYPES, or sums, float32 [pages, heads, 1, dim]; contiguous; changed.
        keys: [tokens, heads, dim], the bounds' dtype, with sums one of DTYPES; each token's heads contiguous.
        slots: int64 [tokens], page * size + place; a page's places come in order. Negative ones are skipped.
        size: entries per page.
    """
    tokens, heads, dim = keys.shape
    job = _UpdateFields(tokens=tokens, apart=keys.stride(0), heads=heads, dim=dim, size=size, halves=bounds.shape[2])
    job.keys, job.slots, job.bounds = keys.data_ptr(), slots.data_ptr(), bounds.data_ptr()
    job.half = keys.dtype == torch.bfloat16
    _kernels()[0](byref(job), torch.get_num_threads())


def choose_pages(
    bounds: Tensor, question: Tensor, table: Tensor, sizes: Tensor, counts: Tensor, most: int, page: int, parts: int
) -> Tensor:
    """Choose the pages with the highest weights for each request and KV head; see `kvsieve_vllm.pages`.

    Args:
        bounds: [pages, heads, 2, dim] in one of DTYPES, or sums, float32 [pages, heads, 1, dim]; contiguous. A page of
            the cache may be several pages here, in order.
        question: float32 [requests, heads, groups, 2 or 1, dim], contiguous.
        table: int32 [requests, width], contiguous.
        sizes: int32 [requests].
        counts: int32 [requests], at least 2.
        most: largest of the counts.
        page: entries per page of the cache.
        parts: pages per page of the cache.

    Returns:
        int32 [requests, heads, most].
    """
    requests, heads, groups, halves, dim = question.shape
    chosen = torch.zeros(requests, heads, most, dtype=torch.int32)
    job = _ChoiceFields(requests=requests, width=table.shape[1], most=most, heads=heads, groups=groups, dim=dim)
    job.bounds, job.question, job.table = bounds.data_ptr(), question.data_ptr(), table.data_ptr()
    job.sizes, job.counts, job.chosen = sizes.data_ptr(), counts.data_ptr(), chosen.data_ptr()
    job.parts = parts
    job.page = page
    job.halves = halves
    job.half = bounds.dtype == torch.bfloat16
    _, choose, needed = _kernels()
    threads = torch.get_num_threads()
    job.bytes = needed(byref(job))
    scratch = torch.empty(job.bytes * threads, dtype=torch.uint8)
    job.scratch = scratch.data_ptr()
    choose(byref(job), threads)
    return chosen


@functools.cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None], Callable[..., int]]:
    needed = function("pages", "choice_scratch", c_void_p, returns=c_int64)
    return function("pages", "update_bounds"), function("pages", "choose_pages"), needed
