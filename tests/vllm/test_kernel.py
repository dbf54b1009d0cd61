"""Contract with vLLM's CPU kernels: where a page's numbers lie, and heads of pages as pages of their own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

PAGE, HEADS, GROUPS, DIM, PAGES, SIZE = 32, 2, 3, 64, 12, 300


@pytest.fixture(scope="module", autouse=True)
def kernels():
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def isa_of(dtype: torch.dtype) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, PAGE, DIM)


def stored(dtype: torch.dtype):
    """A cache, the pages of a request that lie anywhere in it, and its keys and values [SIZE, HEADS, DIM]."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    cache = torch.zeros(PAGES, HEADS, PAGE, 2 * DIM, dtype=dtype)
    pages = torch.randperm(PAGES - 1)[: -(-SIZE // PAGE)] + 1
    keys, values = torch.randn(2, SIZE, HEADS, DIM).to(dtype).unbind()
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:SIZE]
    halves = cache.view(PAGES, HEADS, 2 * PAGE, DIM).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys.contiguous(), values.contiguous(), *halves, slots, isa_of(dtype))
    return cache, pages, keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_read_from_pages_and_put_there(dtype):
    from kvsieve_vllm.cpu_pages import page_layout

    cache, pages, keys, values = stored(dtype)
    layout = page_layout(isa_of(dtype), PAGE, DIM, dtype)
    read = layout.read(cache, pages, SIZE)
    assert read[0].equal(keys.transpose(0, 1)) and read[1].equal(values.transpose(0, 1))
    order = torch.randperm(SIZE)[: 3 * PAGE]
    packed = [each[:, order] for each in read]
    layout.write(cache, pages[:3], *packed)
    again = layout.read(cache, pages, SIZE)
    for got, put, before in zip(again, packed, read, strict=True):
        assert got[:, : 3 * PAGE].equal(put) and got[:, 3 * PAGE :].equal(before[:, 3 * PAGE :])


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_each_head_attends_to_pages_of_its_own(dtype, within):
    from vllm import _custom_ops as ops

    cache, pages, keys, values = stored(dtype)
    query = torch.randn(HEADS, GROUPS, DIM).to(dtype)
    # Places among the request's pages, the last and partly filled one behind the others.
    places = torch.tensor([[1, 4, 9], [0, 8, 9]])
    table = (pages[places] * HEADS + torch.arange(HEADS)[:, None]).to(torch.int32)
    lengths = torch.full((HEADS,), 2 * PAGE + SIZE % PAGE, dtype=torch.int32)
    starts = torch.arange(HEADS + 1, dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        HEADS, GROUPS, 1, DIM, lengths, dtype, starts, True, -1, isa_of(dtype), True
    )
    out = torch.zeros_like(query)
    halves = cache.view(PAGES * HEADS, 1, 2 * PAGE, DIM).chunk(2, dim=2)
    ops.cpu_attention_with_kv_cache(
        query, *halves, out, starts, lengths, DIM**-0.5, True, None, -1, table, 0.0, schedule, None
    )
    for head in range(HEADS):
        entries = (places[head][:, None] * PAGE + torch.arange(PAGE)).flatten()
        entries = entries[entries < SIZE]
        own = [each[entries, head].float() for each in (keys, values)]
        weights = (query[head].float() @ own[0].T * DIM**-0.5).softmax(-1)
        assert (out[head].float() - weights @ own[1]).abs().max() < within
