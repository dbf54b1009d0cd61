"""Attention that skips blocks of keys equals dense attention under a mask of these blocks."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, prompt_attention
from kvsieve.attention import prompt as prompt_module
from kvsieve.core.blocks import BlockGrid, covering
from kvsieve.kernels.cpu import prompt as compiled
from prompt_blocks import SHAPES, exact, problem

TERMS = [
    None,
    AttentionTerms(softcap=2.0),
    AttentionTerms(sinks=torch.tensor([0.3, -1.0, 2.0, 0.0, 0.5, 1.0]).double()),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "capped", "sinks"])
def test_skipping_equals_masking(shape, terms, monkeypatch):
    # Several batches of items even here.
    monkeypatch.setattr(prompt_module, "_ELEMENTS", 4096)
    query, keys, values, chosen, grid = problem(shape)
    if terms is not None and terms.sinks is not None:
        terms = AttentionTerms(None, terms.sinks[: shape[1]])
    expected = exact(query, keys, values, chosen, grid, 0.3, terms)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3, terms=terms)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 4e-3)])
def test_dtypes(dtype, near):
    query, keys, values, chosen, grid = problem(SHAPES[1], dtype, wide=8)
    expected = exact(query, keys, values, chosen, grid, 0.3)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < near


def test_what_is_skipped_is_not_read():
    query, keys, values, chosen, grid = problem(SHAPES[0])
    chosen[..., 0] = False
    keys[:, :, : grid.block], values[:, :, : grid.block] = float("nan"), float("nan")
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3)
    # The first block of queries has it on its diagonal.
    assert found[:, :, grid.queries :].isfinite().all()
    assert found[:, :, : grid.queries].isnan().any()


# Sizes that the C kernel takes: rows, query heads, KV heads, new, stored, queries and keys of a block, sets.
COMPILED = [
    ((1, 4, 2, 300, 300, 128, 128, 4), 64, 64),
    ((2, 4, 2, 200, 471, 128, 64, 2), 64, 64),
    ((1, 6, 2, 400, 430, 256, 128, 6), 40, 80),
    ((1, 2, 1, 150, 333, 192, 192, 1), 128, 128),
    ((1, 3, 3, 70, 70, 64, 64, 3), 10, 32),
]


@pytest.mark.skipif(prompt_module.why_torch() is not None, reason="no processor or compiler for it")
@pytest.mark.parametrize(("shape", "dim", "wide"), COMPILED, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=["plain", "capped", "sinks"])
def test_the_compiled_kernel_is_as_near_as_products_are(shape, dim, wide, terms, monkeypatch):
    query, keys, values, chosen, grid = problem(shape, torch.bfloat16, dim, wide)
    if terms is not None and terms.sinks is not None:
        terms = AttentionTerms(None, terms.sinks[: shape[1]].bfloat16())
    expected = exact(query, keys, values, chosen, grid, 0.3, terms)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3, terms=terms)
    monkeypatch.setattr(compiled, "takes", lambda *given: False)
    plain = prompt_attention(query, keys, values, chosen, grid, scale=0.3, terms=terms)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    error, theirs = ((each.double() - expected).abs().max() for each in (found, plain))
    assert not torch.equal(found, plain) and error <= max(theirs, 0.01)


@pytest.mark.skipif(prompt_module.why_torch() is not None, reason="no processor or compiler for it")
def test_threads_share_its_work(monkeypatch):
    given = problem(COMPILED[1][0], torch.bfloat16, 64, 64)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(prompt_attention(*given, scale=0.3))
    assert torch.equal(*found)


@pytest.mark.skipif(prompt_module.why_torch() is not None, reason="no processor or compiler for it")
def test_the_compiled_kernel_looks_at_nothing_else():
    query, keys, values, chosen, grid = problem(COMPILED[1][0], torch.bfloat16, 64, 64)
    assert grid.pad
    chosen[..., 0] = False
    first = grid.block - grid.pad
    keys[:, :, :first], values[:, :, :first] = float("nan"), float("inf")
    assert prompt_attention(query, keys, values, chosen, grid, scale=0.3).isfinite().all()


def test_other_sizes_dtypes_and_processors_take_torchs_operations(monkeypatch):
    query, keys, values, chosen, grid = problem(COMPILED[0][0], torch.bfloat16, 64, 64)
    assert compiled.takes(query, values, grid, 0.3) and not compiled.takes(query.float(), values.float(), grid, 0.3)
    assert not compiled.takes(query, values, BlockGrid(300, 300, 96, 96), 0.3)
    assert not compiled.takes(query, values[..., :-1], grid, 0.3) and not compiled.takes(query, values, grid, -0.3)

    def never(*given, **options):
        raise AssertionError

    monkeypatch.setattr(compiled, "block_attention", never)
    monkeypatch.setattr(prompt_module, "cpu_kind", lambda: "AMX")
    assert "AVX-512 BF16" in prompt_module.why_torch()
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3)
    assert (found.double() - exact(query, keys, values, chosen, grid, 0.3)).abs().max() < 0.08


def test_a_gradient_is_refused_where_there_is_none():
    query, keys, values, chosen, grid = problem(SHAPES[0])
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        prompt_attention(query.requires_grad_(), keys, values, chosen, grid, scale=0.3)


def test_blocks_cover_a_share_and_what_is_always_chosen():
    mass = torch.tensor([[0.5, 0.1, 0.3, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    always = torch.tensor([False, False, False, True, False])
    assert covering(mass, 0.9, always).tolist() == [[True, False, True, True, False], [False] * 3 + [True, False]]
    assert covering(mass, 0.1, always).tolist() == [[False] * 3 + [True, False]] * 2
    # Nothing without mass, even where all is asked for.
    assert covering(mass, 1.0, always).tolist() == [[True] * 4 + [False], [False] * 3 + [True, False]]


def test_means_of_blocks_leave_padding_out():
    grid = BlockGrid(10, 13, 8, 4)
    assert (grid.pad, grid.first, grid.query_blocks, grid.key_blocks) == (1, 1, 2, 4)
    means = grid.means(torch.arange(13.0).view(1, 1, 13, 1))
    assert means.flatten().tolist() == [1.0, 4.5, 8.5, 11.5]
