"""Measurable tasks of the kernels of readers that choose by pages."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.kernels.task import KernelTask, Shape
from kvsieve import kernels
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.page_weights import best_entries, page_softmax


def estimates(shape: Shape, batch: int, pages: int, channels: int) -> KernelTask:
    """HSA's scores of pages in chosen channels."""
    kv_rows, dim = batch * shape.heads, shape.dim

    def plain(table: Tensor, weights: Tensor, at: Tensor) -> Tensor:
        rows = table.flatten(1, 2).gather(1, at[..., None].expand(-1, -1, pages))
        return weights @ rows.to(weights.dtype)

    def tensors() -> tuple[Tensor, ...]:
        at = torch.rand(kv_rows, 2 * dim, device=shape.device).argsort(-1)[:, :channels].contiguous()
        weights = torch.randn(kv_rows, shape.groups, channels, device=shape.device)
        return shape.random(kv_rows, 2, dim, pages), weights, at

    moved = kv_rows * pages * (channels * shape.dtype.itemsize + 4 * shape.groups)
    what = f"{batch} x {pages} pages, {channels} channels"
    return KernelTask("page scores, HSA", what, moved, tensors, kernels.page_scores, plain)


def bounds(shape: Shape, batch: int, pages: int) -> KernelTask:
    """Quest's bounds of pages."""
    kv_rows = batch * shape.heads

    def plain(table: Tensor, query: Tensor) -> Tensor:
        query, table = query.to(torch.promote_types(query.dtype, torch.float32)), table.to(query.dtype)
        table = table.to(query.dtype)
        return query.clamp(min=0) @ table[:, 0] + query.clamp(max=0) @ table[:, 1]

    def tensors() -> tuple[Tensor, ...]:
        return shape.random(kv_rows, 2, shape.dim, pages), shape.random(kv_rows, shape.groups, shape.dim)

    moved = kv_rows * pages * (2 * shape.dim * shape.dtype.itemsize + 4 * shape.groups)
    return KernelTask("page scores, Quest", f"{batch} x {pages} pages", moved, tensors, kernels.page_bounds, plain)


def update(shape: Shape, batch: int, pages: int) -> KernelTask:
    """A new entry's key taken into the newest page of 16."""
    kv_rows = batch * shape.heads

    def run(table: Tensor, keys: Tensor, length: Tensor) -> Tensor:
        # One slot of each KV row, whatever its length.
        at = torch.arange(kv_rows, device=shape.device)
        kernels.update_pages(table, KVRows(keys, keys, None, at, 0, 16 * pages, DeviceLength(length)), 16)
        return table

    def plain(table: Tensor, keys: Tensor, length: Tensor) -> Tensor:
        at = (length - 1) // 16
        old = table.index_select(3, at)[..., 0]
        wider = torch.stack([torch.maximum(old[:, 0], keys), torch.minimum(old[:, 1], keys)], 1)
        return table.index_copy_(3, at, wider[..., None])

    def tensors() -> tuple[Tensor, ...]:
        length = torch.tensor([16 * pages - 3], device=shape.device)
        return shape.random(kv_rows, 2, shape.dim, pages), shape.random(kv_rows, shape.dim), length

    return KernelTask("page update", f"{batch} x {pages} pages", kv_rows * shape.dim * 10, tensors, run, plain)


def best(shape: Shape, batch: int, pages: int, page: int, count: int) -> KernelTask:
    """Entries of the best pages, in their order."""
    kv_rows = batch * shape.heads
    nothing = torch.zeros(1, 1, device=shape.device)
    among = KVRows(nothing, nothing, None, torch.zeros(kv_rows, dtype=torch.int64), 1, pages * page - 1)

    def run(scores: Tensor) -> Tensor:
        return kernels.page_entries(scores, page, count, True, among.size).sort(-1).values.float()

    def plain(scores: Tensor) -> Tensor:
        weights = page_softmax(scores.clone(), among.size, page).sum(1)
        return best_entries(weights, among.size, page, count, True).sort(-1).values

    def tensors() -> tuple[Tensor, ...]:
        return (torch.randn(kv_rows, shape.groups, pages, device=shape.device),)

    moved = kv_rows * (4 * shape.groups * pages + 8 * count)
    return KernelTask("best pages", f"{batch} x {count} of {pages} pages", moved, tensors, run, plain)
