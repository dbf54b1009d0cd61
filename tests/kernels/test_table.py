"""Triton's executors equal the reference wherever they do not refuse, over random requests."""

from __future__ import annotations

import pytest
import torch

from drawn_requests import CLOSE, Draw, counted
from kvsieve.attention import executors
from kvsieve.attention.reference import reference_attention
from kvsieve.kernels import decode, packed


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """KV rows are split as far as they can be, and tiles are small."""
    for module in (decode, packed):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 50)
        monkeypatch.setattr(module, "_BYTES", 2048)


# Kinds with how many are drawn.
@pytest.mark.parametrize(
    ("kind", "draws"), [("token", 14), ("flat", 20), ("encoded", 13), ("blocks", 8), ("rows", 14), ("chosen", 50)]
)
def test_every_kernel_equals_the_reference_wherever_it_runs(kind, draws):
    terms = []
    for seed in range(draws):
        draw = Draw(kind, seed)
        draw.length, draw.new = min(draw.length, 33), min(draw.new, 20)
        request = draw.request()
        triton = next(row for row in executors(request) if row.name == "Triton")
        if triton.why_not(request) is None:
            wanted, close = reference_attention(request), CLOSE[draw.dtype]
            found = triton.run(request)
            torch.testing.assert_close(counted(request, found), counted(request, wanted), atol=close, rtol=close)
            if draw.length > 1:
                terms.append((request.asked.softcap, request.asked.sinks))
    assert any(softcap is not None for softcap, _ in terms)
    assert any(sinks is not None for _, sinks in terms)
