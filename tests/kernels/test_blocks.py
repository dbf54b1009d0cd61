"""The kernel that attends to chosen blocks of a prompt equals attention under a mask of these blocks."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, prompt_attention
from kvsieve.attention import prompt as prompt_module
from kvsieve.kernels import blocks as module
from prompt_blocks import SHAPES, exact, problem

# Tiles of part of a block of queries; blocks of keys in several steps, of no whole step, and smaller than one.
MORE = [(1, 2, 1, 90, 131, 48, 24, 2), (1, 2, 1, 70, 90, 64, 32, 1)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Nothing but the kernel, in tiles of 16 queries and 16 keys."""
    monkeypatch.setattr(module, "_QUERY_BYTES", 16)
    monkeypatch.setattr(module, "_KEY_BYTES", 16)
    monkeypatch.setattr(prompt_module, "_Items", None)


@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[3:], *MORE], ids=str)
def test_skipping_equals_masking(shape):
    query, keys, values, chosen, grid = problem(shape, torch.float32)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3)
    expected = exact(query, keys, values, chosen, grid, 0.3)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -9.0, 2.0, 9.0])], ids=["", "sinks"])
def test_terms(cap, sinks):
    query, keys, values, chosen, grid = problem((2, 4, 2, 35, 51, 16, 8, 4), torch.float32)
    terms = AttentionTerms(cap, sinks)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3, terms=terms)
    expected = exact(query, keys, values, chosen, grid, 0.3, terms)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.02), (torch.float16, 3e-3)], ids=str)
def test_halves_and_channels_that_are_no_power_of_two(dtype, near):
    query, keys, values, chosen, grid = problem(MORE[0], dtype, 20, 36)
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.2)
    assert found.dtype == dtype
    assert (found.double() - exact(query, keys, values, chosen, grid, 0.2)).abs().max() < near


def test_what_is_skipped_is_not_read():
    query, keys, values, chosen, grid = problem(SHAPES[0], torch.float32)
    chosen[..., 0] = False
    keys[:, :, : grid.block], values[:, :, : grid.block] = float("nan"), float("nan")
    found = prompt_attention(query, keys, values, chosen, grid, scale=0.3)
    # The first block of queries has it on its diagonal.
    assert found[:, :, grid.queries :].isfinite().all() and found[:, :, : grid.queries].isnan().any()
