"""The poison that tests/conftest.py puts into uninitialised memory of kvsieve, so that reading it shows."""

from __future__ import annotations

import torch

from poison import poisoned


def asked_by(module: str, call: str) -> torch.Tensor:
    """What a module of this name gets from a call."""
    return eval(call, {"torch": torch, "like": torch.zeros(2, 3), "__name__": module})


def test_uninitialised_memory_of_kvsieve_is_nan_or_huge():
    for call in ("torch.empty(2, 3)", "torch.empty_like(like)", "like.new_empty(2, 3)", "like.new_empty((2, 3))"):
        assert asked_by("kvsieve.cache.store", call).isnan().all(), call
    strided = "torch.empty_strided((2, 3), (3, 1), dtype=torch.bfloat16)"
    assert asked_by("kvsieve.core.pages", strided).isnan().all()
    assert (asked_by("kvsieve", "torch.empty(4, dtype=torch.int32)") == 2**31 - 1).all()
    assert asked_by("kvsieve", "torch.empty(4, dtype=torch.bool)").all()
    assert asked_by("kvsieve", "torch.empty(4, device='meta')").is_meta
    assert asked_by("kvsieve", "torch.empty(0)").shape == (0,)


def test_other_libraries_get_what_they_asked_for():
    seven = poisoned(lambda *shape: torch.full(shape, 7.0))
    assert eval("seven(2)", {"seven": seven, "__name__": "kvsieve_plugin"}).tolist() == [7, 7]
    assert eval("seven(2)", {"seven": seven, "__name__": "kvsieve.hf"}).isnan().all()
