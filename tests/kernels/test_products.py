"""Products of a few rows with weights as they lie in memory are F.linear's, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvsieve.kernels.cpu import build
from kvsieve.kernels.cpu import products as kernel

pytestmark = pytest.mark.skipif(kernel.built().reason is not None, reason=kernel.built().status)
# Twice what rounding a sum to the dtype may change, and what the order of float32 sums does.
NEAR = {torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7}, torch.float32: {"atol": 1e-4, "rtol": 1e-5}}


def numbers(*shape, dtype=torch.bfloat16):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(dtype)


def wanted(given, weight, bias=None):
    return F.linear(given.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("dim", [1, 16, 31, 48, 64, 577])
@pytest.mark.parametrize("width", [1, 7, 64, 131])
def test_sizes(dim, width, dtype):
    weight, bias = numbers(width, dim, dtype=dtype), numbers(width, dtype=dtype)
    plain, shifted = kernel.Weight(weight, None), kernel.Weight(weight, bias)
    for rows in range(1, 10):
        given = numbers(rows, dim, dtype=dtype)
        found = kernel.multiply(given, plain)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted(given, weight), **NEAR[dtype])
        found = kernel.multiply(given, shifted)
        torch.testing.assert_close(found.double(), wanted(given, weight, bias), **NEAR[dtype])


@pytest.mark.parametrize("dim", [1, 16, 31, 48, 64, 577])
@pytest.mark.parametrize("width", [1, 7, 131])
def test_float32_beside_weights_in_bfloat16(dim, width):
    weight, bias = numbers(width, dim), numbers(width, dtype=torch.float32)
    plain, shifted = (kernel.Weight(weight, each, torch.float32) for each in (None, bias))
    for rows in range(1, 10):
        given = numbers(rows, dim, dtype=torch.float32)
        found = kernel.multiply(given, shifted)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted(given, weight, bias), **NEAR[torch.float32])
        torch.testing.assert_close(kernel.multiply(given, plain).double(), wanted(given, weight), **NEAR[torch.float32])


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", [(80,), (1, 1, 80), (3, 1, 80), (2, 5, 80), (32, 80)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shapes_and_threads(shape, dtype, threads, monkeypatch):
    weight, bias = numbers(1003, 80, dtype=dtype), numbers(1003, dtype=dtype)
    given = numbers(*shape, dtype=dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = kernel.multiply(given, kernel.Weight(weight, bias))
    assert found.is_contiguous() and found.shape == (*shape[:-1], 1003)
    torch.testing.assert_close(found.double(), wanted(given, weight, bias), **NEAR[dtype])


def test_weights_are_read_where_they_lie():
    weight = numbers(40, 48)
    told, given = kernel.Weight(weight, None), numbers(3, 48)
    before = kernel.multiply(given, told)
    weight.mul_(-2)
    assert torch.equal(kernel.multiply(given, told), -2 * before)


def test_numbers_that_are_not_finite_stay_with_their_row():
    weight, given = numbers(9, 48), numbers(5, 48)
    told, clean = kernel.Weight(weight, None), given.clone()
    given[3, 7] = torch.nan
    found, right = kernel.multiply(given, told), kernel.multiply(clean, told)
    others = [0, 1, 2, 4]
    assert found[3].isnan().all() and torch.equal(found[others], right[others])
    given[3, 7] = torch.inf
    assert kernel.multiply(given, told)[3].isinf().all()


def test_other_instructions_compute_the_same(tmp_path, monkeypatch):
    """As compiled without the processor's widest vectors, and without instructions for bfloat16."""
    weight, given, own = numbers(67, 577), numbers(7, 577), build._FLAGS
    for narrow in ("-mno-avx512bf16", "-mno-avx512f", "-mno-avx"):
        monkeypatch.setattr(build, "_FLAGS", (*own, "-O1", narrow))
        monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))
        made = build.library.__wrapped__("products")
        if made.reason is not None:
            pytest.skip(f"no such option: {made.reason}")
        monkeypatch.setattr(kernel, "built", lambda made=made: made)
        kernel._kernel.cache_clear()
        try:
            for dtype in NEAR:
                told = kernel.Weight(weight.to(dtype), None)
                found = kernel.multiply(given.to(dtype), told)
                torch.testing.assert_close(found.double(), wanted(given, weight), **NEAR[dtype])
            found = kernel.multiply(given.float(), kernel.Weight(weight, None, torch.float32))
            torch.testing.assert_close(found.double(), wanted(given, weight), **NEAR[torch.float32])
        finally:
            kernel._kernel.cache_clear()
