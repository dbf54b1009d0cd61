"""Every Triton kernel as a measurable task: its inputs, the call by kernel, and its twin in plain torch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.page_tasks import best, bounds, estimates, update
from benchmarks.kernels.task import KernelTask, Shape
from kvsieve import kernels
from kvsieve.attention import AttentionRequest, ChosenBlocks, DenseEntries, FlatEntries, attend
from kvsieve.core.blocks import BlockGrid
from kvsieve.core.codes import CodeFormat, Codes, decode, encode
from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.core.scoring import window_mass
from kvsieve.kernels.inputs import PackedBlocks
from kvsieve.methods.hsa import hsa_setting
from kvsieve.types import AttentionQueries

# Tokens of sparse prompts, and the part of their blocks that is computed.
PROMPTS = ((8192, 0.25), (32768, 0.25), (32768, 0.1), (32768, 1.0))
LLAMA = {"heads": 8, "groups": 4, "dim": 128}


def _asked(shape: Shape, query: Tensor) -> AttentionQueries:
    return AttentionQueries(query, shape.dim**-0.5)


def dense(shape: Shape, batch: int, length: int) -> KernelTask:
    """A token's attention over all entries."""

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(AttentionRequest(_asked(shape, query), DenseEntries(keys, values)))

    def tensors() -> tuple[Tensor, ...]:
        query = shape.random(batch, shape.heads * shape.groups, 1, shape.dim)
        return query, *(shape.random(batch, shape.heads, length, shape.dim) for _ in range(2))

    moved = 2 * batch * shape.heads * length * shape.dim * shape.dtype.itemsize
    return KernelTask("decode, dense", f"{batch} x {length}", moved, tensors, run, run)


def ragged(shape: Shape, batch: int, length: int) -> KernelTask:
    """A token's attention over ragged heads: one keeps half of all, the next half of the rest, and so on."""
    slots = length * shape.heads

    def run(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        return attend(AttentionRequest(_asked(shape, query), FlatEntries(keys, values, bias)))

    def tensors() -> tuple[Tensor, ...]:
        query = shape.random(batch, shape.heads * shape.groups, 1, shape.dim)
        bias = torch.full((batch, shape.heads, slots), torch.finfo(shape.dtype).min, device=shape.device).to(
            shape.dtype
        )
        start = 0
        for head in range(shape.heads):
            end = slots if head == shape.heads - 1 else start + (slots - start) // 2
            bias[:, head, start:end] = 0
            start = end
        return query, shape.random(batch, slots, shape.dim), shape.random(batch, slots, shape.dim), bias

    moved = batch * slots * (2 * shape.dim + shape.heads) * shape.dtype.itemsize
    return KernelTask("decode, ragged", f"{batch} x {slots}", moved, tensors, run, run)


def chosen(shape: Shape, batch: int, length: int, count: int) -> KernelTask:
    """A token's attention over `count` of the entries of each KV head, anywhere."""
    kv_rows = batch * shape.heads

    @functools.cache
    def stored() -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (shape.random(kv_rows * length, shape.dim) for _ in range(2))
        return keys, values, torch.arange(kv_rows, device=shape.device) * length

    def run(query: Tensor, keys: Tensor, values: Tensor, tail: Tensor, entries: Tensor) -> Tensor:
        among = KVRows(keys, values, None, tail, 1, length)
        return attend(AttentionRequest(_asked(shape, query), among, Choice(entries)))

    def tensors() -> tuple[Tensor, ...]:
        entries = torch.rand(kv_rows, length, device=shape.device).argsort(-1)[:, :count].contiguous()
        return shape.random(kv_rows, shape.groups, shape.dim), *stored(), entries

    moved = kv_rows * count * (2 * shape.dim * shape.dtype.itemsize + 8)
    return KernelTask("decode, chosen entries", f"{batch} x {count} of {length}", moved, tensors, run, run)


def mass(shape: Shape, batch: int, length: int, window: int) -> KernelTask:
    """Attention mass of a prompt's last `window` queries."""

    def run(query: Tensor, keys: Tensor) -> Tensor:
        return window_mass(_asked(shape, query), keys)

    def tensors() -> tuple[Tensor, ...]:
        query = shape.random(batch, shape.heads * shape.groups, window, shape.dim)
        return query, shape.random(batch, shape.heads, length, shape.dim)

    moved = batch * shape.heads * length * (2 * shape.dim * shape.dtype.itemsize + 4 * shape.groups)
    return KernelTask("window mass", f"{batch} x {length}, window {window}", moved, tensors, run, run)


def encoded(shape: Shape, batch: int, blocks: int, tokens: int, bits: int) -> KernelTask:
    """A token's attention over blocks of entries in few bits, keys by channel and values by token."""
    kv_rows, dim = batch * shape.heads, shape.dim
    forms = CodeFormat(bits, "channel"), CodeFormat(bits, "token", dim)

    def parts(tensors: tuple[Tensor, ...]) -> list[Codes]:
        return [Codes(*tensors[:3]), Codes(*tensors[3:])]

    def run(query: Tensor, table: Tensor, fills: Tensor, *codes: Tensor) -> Tensor:
        keys, values = (
            PackedBlocks(each.packed, each.scale, each.zero, None, bits, dim, form.group)
            for form, each in zip(forms, parts(codes), strict=True)
        )
        return kernels.packed_decode(query, None, table, fills, keys, values)[0]

    def plain(query: Tensor, table: Tensor, fills: Tensor, *codes: Tensor) -> Tensor:
        keys, values = (
            decode(form, each, dim).to(query.dtype)[table].flatten(1, 2)
            for form, each in zip(forms, parts(codes), strict=True)
        )
        real = torch.arange(tokens, device=table.device) < fills[..., None]
        logits = (query @ keys.transpose(1, 2)).masked_fill(~real.flatten(1)[:, None], float("-inf"))
        return logits.softmax(-1) @ values

    def tensors() -> tuple[Tensor, ...]:
        query = torch.randn(kv_rows, shape.groups, dim, device=shape.device) / dim**0.5
        table = torch.randperm(kv_rows * blocks, device=shape.device).view(kv_rows, blocks)
        fills = torch.full_like(table, tokens)
        fills[:, -1] = tokens - tokens // 3
        made = [encode(form, torch.randn(table.numel(), tokens, dim, device=shape.device)) for form in forms]
        return query, table, fills, *(part for each in made for part in each.tensors())

    moved = int(kv_rows * blocks * tokens * dim * sum(form.bits_per_number(dim, tokens) for form in forms) / 8)
    return KernelTask(f"decode, {bits} bits", f"{batch} x {blocks * tokens}", moved, tensors, run, plain)


def prompt(shape: Shape, batch: int, grid: BlockGrid, density: float) -> KernelTask:
    """A prompt's attention over some of its blocks; plain: over all, under a mask, a head at a time."""
    heads, scale = shape.heads * shape.groups, shape.dim**-0.5

    def run(query: Tensor, keys: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
        return attend(AttentionRequest(_asked(shape, query), DenseEntries(keys, values), ChosenBlocks(chosen, grid)))

    def plain(query: Tensor, keys: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
        seen = (chosen & grid.visible(chosen.device)) | grid.diagonal(chosen.device)
        slots = torch.arange(grid.length, device=chosen.device)
        causal = slots <= slots[grid.length - grid.new :, None]
        outs = []
        for head in range(heads):
            mask = seen[:, head, None].repeat_interleave(grid.queries, 2).repeat_interleave(grid.block, 3)
            mask = mask[:, :, : grid.new, grid.pad : grid.pad + grid.length] & causal
            k, v = (part[:, head // shape.groups, None] for part in (keys, values))
            outs.append(F.scaled_dot_product_attention(query[:, head, None], k, v, attn_mask=mask, scale=scale))
        return torch.cat(outs, 1)

    def tensors() -> tuple[Tensor, ...]:
        query = shape.random(batch, heads, grid.new, shape.dim)
        stored = (shape.random(batch, shape.heads, grid.length, shape.dim) for _ in range(2))
        chosen = torch.rand(batch, heads, grid.query_blocks, grid.key_blocks, device=shape.device) < density
        return query, *stored, chosen

    moved = 2 * batch * shape.dim * shape.dtype.itemsize * (heads * grid.new + shape.heads * grid.length)
    what = f"{batch} x {grid.new} of {grid.length}, {density:.0%} of blocks"
    return KernelTask("prompt, chosen blocks", what, moved, tensors, run, plain)


def small(shape: Shape) -> list[KernelTask]:
    """Every kernel on odd sizes."""
    return [
        dense(shape, 2, 501),
        ragged(shape, 2, 167),
        chosen(shape, 2, 300, 77),
        estimates(shape, 2, 301, 7),
        bounds(shape, 2, 301),
        update(shape, 2, 33),
        best(shape, 2, 301, 7, 64),
        mass(shape, 2, 333, 13),
        *(encoded(shape, 2, 7, 20, bits) for bits in (4, 2)),
        prompt(shape, 2, BlockGrid(50, 83, 32, 16), 0.4),
    ]


def large(shape: Shape) -> list[KernelTask]:
    """The work of one layer of Llama-3.1-8B at 8K to 128K tokens."""
    at_512, at_4096 = (hsa_setting(131072, tokens, shape.dim) for tokens in (512, 4096))
    return [
        *(dense(shape, *size) for size in ((1, 8192), (1, 131072), (4, 32768))),
        *(ragged(shape, *size) for size in ((1, 13107), (4, 13107))),
        *(chosen(shape, *size) for size in ((1, 131072, 256), (1, 131072, 2048), (8, 32768, 2048))),
        *(estimates(shape, 1, 131072 // one.page, one.channels) for one in (at_512, at_4096)),
        estimates(shape, 8, 131072 // at_4096.page, at_4096.channels),
        *(bounds(shape, batch, 8192) for batch in (1, 4)),
        update(shape, 1, 8192),
        best(shape, 1, 8192, 16, 256),
        *(mass(shape, 1, *size) for size in ((32768, 32), (131072, 8), (131072, 32))),
        *(encoded(shape, *size) for size in ((1, 256, 128, 4), (1, 1024, 128, 4), (4, 256, 128, 4), (1, 1024, 128, 2))),
        *(prompt(shape, 1, BlockGrid(length, length, 128, 128), part) for length, part in PROMPTS),
    ]
