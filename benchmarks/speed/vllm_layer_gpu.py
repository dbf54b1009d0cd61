"""One layer's attention on a GPU, for benchmarks/speed/vllm_plugin.py: vLLM's kernels, and pages chosen and read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import triton_attn

from kvsieve.methods import Quest
from kvsieve_vllm.pages import PageBounds, choose_pages

COPIES = 4


def calls(
    length: int, requests: int, heads: int, kv_heads: int, dim: int, page: int, read: int, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """Make calls that attend for one token of each request, in turn to one of a few caches of random entries.

    Args:
        length: entries of a request.
        requests: in the batch.
        heads: query heads.
        kv_heads: KV heads.
        dim: channels of a head.
        page: entries of a page.
        read: pages that a head of a request reads.
        dtype: of the entries.
    """
    new = functools.partial(torch.randn, device="cuda", dtype=dtype)
    each, wide = -(-length // page), kv_heads * page * 2 * dim
    blocks, groups = requests * each + 1, heads // kv_heads
    copies = max(1, min(COPIES, (8 << 30) // (blocks * wide * dtype.itemsize)))
    caches = [new(blocks, kv_heads, page, 2 * dim) for _ in range(copies)]
    bounds = [PageBounds(blocks, kv_heads, dim, page, caches[0]) for _ in range(copies)]
    for held in bounds:
        held.table.normal_()
    query, key = new(requests, heads, dim), new(requests, kv_heads, dim)
    table = torch.arange(1, blocks, dtype=torch.int32, device="cuda").view(requests, each)
    sizes = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    slots = table[:, -1].long() * page + (length - 1) % page
    counts, some = torch.full_like(sizes, read), (length - 1) % page + 1 + (read - 1) * page
    few = torch.full((requests * kv_heads,), some, dtype=torch.int32, device="cuda")
    parts, turn = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS, [0]
    room = [torch.empty(requests * heads * parts * size, device="cuda") for size in (dim, 1, 1)]

    def attend(cache: Tensor, pages: Tensor, lengths: Tensor, most: int) -> Tensor:
        shape = (len(lengths), -1, dim)
        asked, (keys, values) = query.view(shape), cache.transpose(1, 2).split(dim, dim=-1)
        rows, count, into = len(lengths), asked.shape[1], torch.empty_like(asked)
        triton_attn.unified_attention(
            q=asked, k=keys, v=values, out=into, cu_seqlens_q=starts[: rows + 1], max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=most, softmax_scale=dim**-0.5, causal=True, window_size=(-1, -1), block_table=pages, softcap=0,
            q_descale=None, k_descale=None, v_descale=None,
            seq_threshold_3D=triton_attn.MIN_LAUNCH_GRID_SIZE_2D // cache.shape[1], num_par_softmax_segments=parts,
            softmax_segm_output=room[0].view(-1, count, parts, dim), softmax_segm_max=room[1].view(-1, count, parts),
            softmax_segm_expsum=room[2].view(-1, count, parts),
        )  # fmt: skip
        return into

    starts = torch.arange(requests * kv_heads + 1, dtype=torch.int32, device="cuda")

    def next_one() -> int:
        turn[0] = (turn[0] + 1) % copies
        return turn[0]

    def choose(number: int) -> Tensor:
        bounds[number].update(key, slots)
        asked = Quest(budget=256).question(query.view(requests, kv_heads, groups, dim), dim**-0.5, page, None)
        return choose_pages(bounds[number].table, asked, table, sizes, counts, read, page).flatten(0, 1)

    def sparse(number: int) -> Tensor:
        return attend(caches[number].view(blocks * kv_heads, 1, page, 2 * dim), choose(number), few, some)

    found = {
        "dense": lambda: attend(caches[next_one()], table, sizes, length),
        "choice": lambda: choose(next_one()),
        "sparse": lambda: sparse(next_one()),
    }
    flash = flash_attention(query, caches, table, sizes, length, starts[: requests + 1])
    return found if flash is None else {**found, "dense_flash_attention": lambda: flash(next_one())}


def flash_attention(
    query: Tensor, caches: list[Tensor], table: Tensor, sizes: Tensor, length: int, starts: Tensor
) -> Callable[[int], Tensor] | None:
    """Make the call of FlashAttention 3 where vLLM has it, to the same entries in the order that it takes."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError:
        return None
    if not is_fa_version_supported(3):
        return None
    dim = query.shape[-1]
    lying = [tuple(half.contiguous() for half in each.transpose(1, 2).split(dim, dim=-1)) for each in caches]
    return lambda number: flash_attn_varlen_func(
        query, *lying[number], max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=length, seqused_k=sizes,
        softmax_scale=dim**-0.5, causal=True, block_table=table, fa_version=3,
    )  # fmt: skip


def milliseconds(run: Callable[[], Any], times: int) -> dict[str, float]:
    """Time a call, launched again and again, and replayed from a CUDA graph, where Python and launches cost nothing."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            run()
    return {"launched": _timed(run, times), "replayed": _timed(graph.replay, times) / COPIES}


def _timed(run: Callable[[], Any], times: int) -> float:
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / times
