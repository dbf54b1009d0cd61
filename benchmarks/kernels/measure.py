"""The Triton kernels on a GPU: each beside its twin in plain torch, and how near it comes to the memory's rate.

Rates are of launches in a CUDA graph, as decoding runs them, over so many different buffers that no cache holds them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.task import Shape
from benchmarks.kernels.tasks import LLAMA, large, small
from kvsieve import kernels

# Largest error that passes, relative to the largest number of the twin in float64, by the dtype of the result.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
# Inputs of one measurement are made until no cache holds them, or they take about this much.
HELD_BYTES = 24 << 30
ROUNDS = 25
# Width of the MLP of Llama-3.1-8B.
INNER = 14336


def check(device: torch.device) -> list[dict[str, Any]]:
    """Every kernel against its twin in float64, on odd sizes and in every dtype: errors and whether they pass."""
    rows = []
    for dtype in kernels.dtypes():
        for sizes in ({"heads": 2, "groups": 3, "dim": 40}, {"heads": 1, "groups": 17, "dim": 128}):
            for task in small(Shape(**sizes, device=device, dtype=dtype)):
                tensors = task.tensors()
                exact = [each.double() if each.is_floating_point() else each for each in tensors]
                theirs, ours = task.plain(*exact), task.run(*tensors)
                error = ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()
                row = {"kernel": task.name, "dtype": str(dtype).removeprefix("torch."), **sizes, "error": error}
                rows.append(row | {"passes": error <= TOLERANCES[ours.dtype]})
    return rows


def measure(device: torch.device) -> dict[str, Any]:
    """The rate of a copy, and for every task of `large` milliseconds by kernel and in plain torch and the rate's share.

    Window masses also as a share of their layer's prefill, and sparse prompts as one of torch's attention over all
    blocks.
    """
    shape = Shape(**LLAMA, device=device, dtype=torch.bfloat16)
    copied = _copy_rate(device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    prefill: dict[int, float] = {}
    rows = []
    for task in large(shape):
        sets = [task.tensors()]
        while len(sets) * task.bytes < 4 * cache and torch.cuda.memory_allocated(device) < HELD_BYTES:
            sets.append(task.tensors())
        by_kernel = _milliseconds([_bound(task.run, each) for each in sets])
        with mock.patch.object(kernels, "usable", lambda *tensors: False):
            plain = _milliseconds([_bound(task.plain, each) for each in sets])
        row = {"kernel": task.name, "shape": task.shape, "bytes": task.bytes, "inputs": len(sets), "ms": by_kernel}
        row |= {"plain_ms": plain, "share_of_copy": task.bytes / by_kernel / copied}
        if task.name == "window mass":
            length = sets[0][1].shape[2]
            if length not in prefill:
                prefill[length] = _layer_ms(shape, length)
            row |= {"layer_ms": prefill[length], "share_of_layer": by_kernel / prefill[length]}
        if task.name == "prompt, chosen blocks":
            full = _milliseconds([functools.partial(_over_all, *each[:3]) for each in sets])
            row |= {"full_ms": full, "share_of_full": by_kernel / full}
        rows.append(row)
        del sets
        torch.cuda.empty_cache()
    return {"copy_gb_per_s": copied / 1e6, "rows": rows}


def _over_all(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written per millisecond by a copy of 1 GiB."""
    source, to = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.nbytes / _milliseconds([lambda: to.copy_(source)])


def _bound(run: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    return lambda: run(*tensors)


def _milliseconds(runs: list[Callable[[], Tensor]]) -> float:
    """Return the time of one run: the median over replays of a graph of them all."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / len(runs))
    return statistics.median(times[ROUNDS // 5 :])


def _layer_ms(shape: Shape, length: int) -> float:
    """Attention and linear layers of one decoder layer reading a prompt of `length` tokens."""
    heads, width = shape.heads * shape.groups, shape.heads * shape.groups * shape.dim
    query = shape.random(1, heads, length, shape.dim)
    keys, values = (shape.random(1, shape.heads, length, shape.dim) for _ in range(2))
    x, wide = shape.random(length, width), shape.random(length, INNER)
    outs = (width + 2 * shape.heads * shape.dim, width, INNER, INNER)
    weights, down = [shape.random(each, width) for each in outs], shape.random(width, INNER)

    def run() -> Tensor:
        for weight in weights:
            F.linear(x, weight)
        F.linear(wide, down)
        return _over_all(query, keys, values)

    return _milliseconds([run])
