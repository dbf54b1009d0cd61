"""Attention that skips blocks of keys equals dense attention under a mask of these blocks."""

from __future__ import annotations

import pytest
import torch

from kvsieve.attention import masked_attention, prompt_attention
from kvsieve.attention import prompt as prompt_module
from kvsieve.core.blocks import BlockGrid, covering
from kvsieve.types import AttentionTerms

# Rows, query heads, KV heads, new, stored, queries and keys of a block, sets.
SHAPES = [
    (1, 4, 2, 100, 100, 16, 8, 2),
    (2, 4, 2, 75, 131, 16, 8, 4),
    (1, 6, 3, 33, 200, 32, 8, 3),
    (1, 2, 2, 40, 45, 16, 16, 2),
    (2, 3, 1, 64, 64, 16, 4, 1),
]


def problem(shape, dtype=torch.float64, wide=12):
    batch, query_heads, heads, new, length, queries, block, sets = shape
    made = torch.Generator().manual_seed(sum(shape))
    parts = ((query_heads, new, 8), (heads, length, 8), (heads, length, wide))
    query, keys, values = (torch.randn(batch, *part, generator=made, dtype=torch.float64).to(dtype) for part in parts)
    grid = BlockGrid(new, length, queries, block)
    chosen = torch.rand(batch, sets, grid.query_blocks, grid.key_blocks, generator=made) < 0.4
    return query, keys, values, chosen, grid


def mask_of(chosen, grid, query_heads):
    """The same choice, by entries."""
    full = (chosen & grid.visible(chosen.device)) | grid.diagonal(chosen.device)
    full = full.repeat_interleave(query_heads // chosen.shape[1], 1)
    full = full.repeat_interleave(grid.queries, 2).repeat_interleave(grid.block, 3)
    full = full[:, :, : grid.new, grid.pad : grid.pad + grid.length]
    own = torch.arange(grid.length - grid.new, grid.length)[:, None]
    return full & (torch.arange(grid.length) <= own)


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
    expected = masked_attention(query, keys, values, mask_of(chosen, grid, shape[1]), scale=0.3, terms=terms)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3, terms=terms)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 4e-3)])
def test_dtypes(dtype, near):
    query, keys, values, chosen, grid = problem(SHAPES[1], dtype, wide=8)
    mask = mask_of(chosen, grid, 4)
    expected = masked_attention(*(part.double() for part in (query, keys, values)), mask, scale=0.3)
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
