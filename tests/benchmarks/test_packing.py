"""benchmarks/speed/packing.py: prompts in one pass get what they get alone."""

from __future__ import annotations

import torch

from benchmarks.speed import packing
from kvsieve.hf.attach import attached
from kvsieve.planning.plans import Plan
from tiny_models import build


def test_prompts_together_are_as_alone():
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 120, (1, size), generator=draw) for size in (5, 9, 17)]
    with attached(build("llama"), Plan(), "eager", any_plan=True) as sieve, torch.no_grad():
        alone, joined = packing.one_by_one(sieve, prompts), packing.together(sieve, prompts)
        found = packing.shared(sieve, 40, 3, 1)
    for one, other in zip(alone, joined, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert found["joint_s"] > 0 and found["rows"] == 3
