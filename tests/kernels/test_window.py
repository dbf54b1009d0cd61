"""The window kernels equal the plain ones: mass, padding, the causal corner, pooling."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, window_mass
from kvsieve import kernels
from kvsieve.core.scoring import group_mean, pool, pooled_mass
from kvsieve.kernels import window as module
from layers import context

# Types with numbers of query heads per KV head and queries of the window.
MIXES = {
    "fp32-G3-W33": (torch.float32, 3, 33),
    "bf16-G1-W1": (torch.bfloat16, 1, 1),
    "bf16-G3-W5": (torch.bfloat16, 3, 5),
    "fp16-G2-W16": (torch.float16, 2, 16),
}


def plain(query, keys, valid=None, terms=None):
    """The twin, in float64."""
    return window_mass(query.double(), keys.double(), 0.3, valid=valid, terms=terms).float()


@pytest.mark.parametrize("dtype, groups, window", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("padding", [None, "rows", "heads"])
@pytest.mark.parametrize("parts", [1, 20])
def test_mass(dtype, groups, window, padding, parts, monkeypatch):
    monkeypatch.setattr(module, "multiprocessors", lambda device: parts)
    monkeypatch.setattr(module, "_KEY_BYTES", 2048)
    torch.manual_seed(window)
    length, heads, dim = 77, 2, 20
    # Views of larger buffers, heads and entries in either order.
    query = torch.randn(2, window + 3, heads * groups, dim).to(dtype).transpose(1, 2)[:, :, 3:]
    keys = torch.randn(2, heads, length + 9, dim).to(dtype)[:, :, 4 : 4 + length]
    valid = None
    if padding is not None:
        valid = torch.rand(2, 1 if padding == "rows" else heads, length) > 0.3
        valid[1, :, :50] = False
    ours = window_mass(query, keys, 0.3, valid=valid)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain(query, keys, valid), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -9, 2, 0, 9, -4])], ids=["", "sinks"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_mass_with_terms(softcap, sinks, padded, monkeypatch):
    monkeypatch.setattr(module, "_KEY_BYTES", 2048)
    torch.manual_seed(7)
    query, keys = torch.randn(2, 6, 33, 20), torch.randn(2, 2, 77, 20)
    valid = torch.rand(2, 1, 77) > 0.3 if padded else None
    terms = AttentionTerms(softcap, sinks)
    ours = window_mass(query, keys, 0.3, valid=valid, terms=terms)
    torch.testing.assert_close(ours, plain(query, keys, valid, terms), atol=1e-5, rtol=1e-5)


def test_a_window_of_padding_and_one_as_long_as_the_prompt():
    query, keys = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    valid = torch.ones(2, 1, 9, dtype=torch.bool)
    valid[1] = False
    ours = window_mass(query, keys, 0.3, valid=valid)
    torch.testing.assert_close(ours[:1], plain(query[:1], keys[:1]))
    assert ours[1].eq(0).all()


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 7])
@pytest.mark.parametrize("heads", [1, 2, 6], ids=lambda h: f"H{h}")
def test_pooling(kind, kernel, heads, monkeypatch):
    monkeypatch.setattr(module, "_POOLED", 16)
    mass = torch.rand(2, 6, 50)[..., :41]
    theirs = group_mean(pool(mass, kernel, kind), heads)
    torch.testing.assert_close(kernels.pooled(mass, heads, kernel, kind), theirs)


@pytest.mark.parametrize("heads", [None, 2, 1])
def test_pooled_mass_of_a_layer(heads):
    ctx = context(torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8))
    ours = pooled_mass(ctx, 5, 7, "max", heads)
    theirs = pool(plain(ctx.query[:, :, -5:], ctx.keys * (ctx.scale / 0.3))[..., :-5], 7, "max")
    torch.testing.assert_close(ours, theirs if heads is None else group_mean(theirs, heads), atol=1e-6, rtol=1e-5)
