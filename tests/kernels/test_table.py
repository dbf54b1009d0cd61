"""Triton's executors equal the reference wherever they do not refuse, over random requests."""

from __future__ import annotations

import pytest
import torch

from drawn_requests import CLOSE, Draw, counted
from kvsieve.attention import executors
from kvsieve.attention.reference import reference_attention


@pytest.mark.parametrize("kind", ["token", "flat", "encoded", "blocks", "rows", "chosen"])
def test_every_kernel_equals_the_reference_wherever_it_runs(kind):
    ran = 0
    for seed in range(8):
        draw = Draw(kind, seed)
        draw.length, draw.new = min(draw.length, 65), min(draw.new, 20)
        request = draw.request()
        triton = next(row for row in executors(request) if row.name == "Triton")
        if triton.why_not(request) is None:
            wanted, close, ran = reference_attention(request), CLOSE[draw.dtype], ran + 1
            found = triton.run(request)
            torch.testing.assert_close(counted(request, found), counted(request, wanted), atol=close, rtol=close)
    assert ran
