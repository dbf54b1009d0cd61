"""Compile every kernel for GPUs that need not be there, as calls on real shapes would; run by test_compile.py.

Prints a line of JSON per kernel and variant: for what it is, its shared memory in bytes, and how many of its reads are
asynchronous copies of 16 bytes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from kvsieve.core.blocks import BlockGrid
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.kernels import decode, packed, window
from kvsieve.kernels.blocks import block_attention
from kvsieve.kernels.choice import largest_channels, page_entries
from kvsieve.kernels.decode import decode_attention, kv_row_attention, ragged_decode
from kvsieve.kernels.inputs import PackedBlocks
from kvsieve.kernels.packed import exact_decode, packed_decode
from kvsieve.kernels.paged import paged_choice, paged_scores
from kvsieve.kernels.pages import page_bounds, page_scores, update_pages
from kvsieve.kernels.window import pooled, window_mass
from kvsieve.types import AttentionQueries


def pretend(capability: int, half: int | None, **facts: object) -> None:
    """Let every launch end with its machine code for this compute capability.

    half: 0 or 1, of each kernel the first launch and from then on every second one; None for all of them.
    """
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
    )
    decode.multiprocessors = packed.multiprocessors = window.multiprocessors = lambda device: 132

    launches: Counter[str] = Counter()

    def compiled(kernel, grid):
        def call(*args, **sizes):
            number = launches[kernel.__name__]
            launches[kernel.__name__] += 1
            if half is not None and number and number % 2 != half:
                return
            found = kernel.warmup(*args, grid=grid, **sizes)
            assert found.asm["cubin"]
            wide = found.asm["ptx"].count("cp.async.cg.shared.global")
            line = {"name": kernel.__name__, "launch": number, "shared": found.metadata.shared, "wide": wide}
            print(json.dumps({"capability": capability, **facts, **line}), flush=True)

        return call

    triton.JITFunction.__getitem__ = compiled


def call_all(dtype: torch.dtype, groups: int, dim: int, value_dim: int) -> None:
    """A call of every function, without what is optional and with all of it."""
    heads, length = 2, 1 << 16
    count = torch.tensor(length - 3)
    query = torch.zeros(1, heads * groups, 1, dim, dtype=dtype)
    keys = torch.zeros(1, heads, length + 5, dim, dtype=dtype)[:, :, 5:]
    values = torch.zeros(1, heads, length, value_dim, dtype=dtype)
    valid = torch.ones(1, 1, length, dtype=torch.bool)
    plain = AttentionQueries(query, 0.1)
    decode_attention(plain, keys, values)
    terms = AttentionQueries(query, 0.1, 50.0, torch.zeros(heads * groups, dtype=dtype))
    decode_attention(terms, keys, values, length=count, valid=valid)
    decode_attention(terms.of(query.expand(-1, -1, 17, -1)), keys, values, length=count, valid=valid)
    bias = torch.zeros(1, heads, length, dtype=dtype)
    ragged_decode(plain, keys[0, :1], values[0, :1], bias)
    ragged_decode(plain.of(query.expand(-1, -1, 5, -1)), keys[0, :1], values[0, :1], bias, length - 3)
    packed = query.view(heads, groups, dim)
    rows = AttentionQueries(packed, 0.1)
    flat = keys.flatten(0, 2), values.flatten(0, 2)
    slots, tail = (torch.zeros(heads, *size, dtype=torch.int64) for size in ((length,), ()))
    stored = KVRows(*flat, None, tail, 1, length)
    kv_row_attention(rows, stored, slots[:, :256])
    stored = KVRows(*flat, slots, tail, 1, length)
    kv_row_attention(rows, stored, slots[:, None, :256].expand(-1, groups, -1))
    kv_row_attention(rows, KVRows(*flat, slots, tail, heads, length, DeviceLength(count)))
    window = torch.zeros(1, heads * groups, 40, dim, dtype=dtype)[:, :, 8:]
    window_mass(plain.of(window), keys)
    window_mass(terms.of(window), keys, valid)
    for pooling in ("avg", "max"):
        pooled(torch.zeros(1, heads * groups, length), heads, 7, pooling)
    table = torch.zeros(heads, 2, dim, 4096, dtype=dtype)
    page_bounds(table, packed, count)
    page_scores(table[..., :4001], torch.zeros(heads, groups, 9), slots[:, :9])
    bounds, question = torch.zeros(9, heads, 2, dim, dtype=dtype), torch.zeros(3, heads, groups, 2, dim)
    pages, sizes = torch.zeros(3, 1001, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    paged_choice(paged_scores(bounds, question, pages, sizes, 32), pages, sizes, sizes, 8, 32, 1, False)
    paged_choice(paged_scores(bounds, question, pages, sizes, 4, 8), pages, sizes, sizes, 8, 4, 8, True)
    stored, tail = torch.zeros(9, dim, dtype=dtype), torch.zeros(heads, dtype=torch.int64)
    update_pages(table, KVRows(stored, stored, None, tail, 1, 65536, DeviceLength(count)), 16)
    update_pages(table[:, :1], KVRows(stored, stored, slots[:, :3], tail, 1, 5), 1)
    largest_channels(packed, 9, 0.1, 2)
    page_entries(torch.zeros(heads, groups, 4001), 16, 256, True, 64009, count)
    exact_decode(
        rows.of(packed[:, :, None]), keys[:, :, :200], values[:, :, :200], length=count, valid=valid[..., :200]
    )
    encoded(heads, groups, dim, value_dim)
    grid = BlockGrid(1000, length, 128, 128)
    lists = torch.zeros(1, heads, grid.query_blocks, grid.key_blocks + 1, dtype=torch.int32)
    prompt, counts = query.expand(-1, -1, 1000, -1).contiguous(), lists[..., 0].contiguous()
    block_attention(terms.of(prompt), keys, values, lists, counts, grid)


def encoded(heads: int, groups: int, dim: int, value_dim: int) -> None:
    """Keys of 4 bits per channel; values of 3 bits per token that stand for levels, and of 2, 4 and 8 bits."""
    query, blocks = torch.zeros(heads, groups, dim), torch.zeros(heads, 512, dtype=torch.int64)

    def made(bits: int, size: int, group: int, zero: bool, levels: torch.Tensor | None = None) -> PackedBlocks:
        packed = torch.zeros(1024, 128, size * bits // 8, dtype=torch.uint8)
        scale = torch.zeros(1024, *((128, size // group) if group else (1, size)), dtype=torch.float16)
        return PackedBlocks(packed, scale, scale if zero else None, levels, bits, size, group)

    keys = made(4, dim, 0, True)
    packed_decode(query, query[..., 0], blocks, blocks, keys, made(3, value_dim, 16, False, torch.zeros(16)), 50.0)
    packed_decode(query, query[..., 0], blocks, blocks, keys, made(4, value_dim, value_dim, True), 50.0)
    packed_decode(query, None, blocks, blocks, made(2, dim, dim, True), made(2, value_dim, value_dim // 4, True))
    packed_decode(query, None, blocks, blocks, made(8, dim, dim // 2, False), made(8, value_dim, 0, True))


if __name__ == "__main__":
    # Each argument is CAPABILITY,HALF,DTYPE,G,D,Dv, and HALF may be empty.
    for argument in sys.argv[1:]:
        capability, half, dtype, *shape = argument.split(",")
        pretend(int(capability), int(half) if half else None, dtype=dtype)
        call_all(getattr(torch, dtype), *map(int, shape))
