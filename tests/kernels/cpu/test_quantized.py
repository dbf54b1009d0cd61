"""Weights in GGUF's blocks: numbers are gguf.dequantize's, and products are float64's but for rounding."""

from __future__ import annotations

import copy
import ctypes
import mmap
import pickle

import gguf
import numpy as np
import pytest
import torch

from kvsieve.kernels.cpu import build
from kvsieve.kernels.cpu import quantized as kernel
from kvsieve.kernels.cpu.quantized import FORMATS, MOST_ROWS, QuantizedMatrix

# Where scales of float16 lie in a block.
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
# Sums of float32 over their terms' absolute values, and what rounding to bfloat16 may change.
NEAR = {torch.float32: (3e-6, 0.0), torch.bfloat16: (3e-6, 2**-8)}
needs_kernel = pytest.mark.skipif(build.library("quantized").reason is not None, reason="there is no C compiler")


def blocks(kind: str, width: int, count: int, seed: int = 0) -> torch.Tensor:
    """Random bytes [width, count blocks] with scales between -0.1 and 0.1."""
    generator = np.random.default_rng(seed)
    size = FORMATS[kind].nbytes
    if size <= 4:
        numbers = generator.standard_normal((width, count), dtype=np.float32)
        numbers = torch.from_numpy(numbers).to({"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16))
        return numbers.view(torch.uint8)
    data = generator.integers(0, 256, (width, count, size), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        scales = generator.uniform(-0.1, 0.1, (width, count, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return torch.from_numpy(data.reshape(width, count * size))


def numbers_of(data: torch.Tensor, kind: str) -> torch.Tensor:
    found = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(found, dtype=np.float32))


def sizes(kind: str) -> tuple[int, ...]:
    """Blocks of a row: few, an odd number, and more than the kernel unpacks at once."""
    size = FORMATS[kind].size
    return (1, 3, 8, 1100 // size + 3) if size > 1 else (1, 3, 31, 64, 1157)


def guarded(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN-filled memory, and a tensor within it."""
    count = int(np.prod(shape))
    memory = torch.full((count + 64,), torch.nan, dtype=dtype)
    return memory, memory[32 : 32 + count].view(shape)


def compare(found: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Check products against float64, to within the rounding of float32 sums of as large terms."""
    shift = 0 if bias is None else bias.double()
    wanted = given.double() @ weight.double().T + shift
    terms = given.double().abs() @ weight.double().abs().T + abs(shift)
    of_terms, of_sum = NEAR[found.dtype]
    assert ((found.double() - wanted).abs() <= of_terms * terms + of_sum * wanted.abs()).all()


def inputs(rows: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows + inner)).to(dtype)


def check_products(kind: str, widths: tuple[int, ...], rows: tuple[int, ...], counts: tuple[int, ...]) -> None:
    for width in widths:
        for count in counts:
            data = blocks(kind, width, count, seed=count)
            matrix, weight = QuantizedMatrix(data, kind), numbers_of(data, kind)
            for dtype in NEAR:
                bias = inputs(1, width, dtype)[0]
                for tokens in rows:
                    given = inputs(tokens, matrix.inner, dtype)
                    compare(kernel.multiply(given, matrix, bias), given, weight, bias)
                compare(kernel.multiply(given, matrix, None), given, weight)


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers(kind):
    for count in sizes(kind):
        data = blocks(kind, 5, count)
        matrix, wanted = QuantizedMatrix(data, kind), numbers_of(data, kind)
        for dtype in NEAR:
            memory, out = guarded(5, matrix.inner, dtype=dtype)
            assert matrix.dequantize(out) is out
            assert torch.equal(out, wanted.to(dtype))
            assert memory[:32].isnan().all() and memory[-32:].isnan().all()


@pytest.mark.parametrize("kind", FORMATS)
def test_products(kind):
    check_products(kind, (1, 3, 5, 33), (1, 2, 5, 6, 7, 17, 32), sizes(kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_gguf_packs(kind):
    numbers = np.random.default_rng(1).standard_normal((7, 256), dtype=np.float32)
    data = torch.from_numpy(gguf.quantize(numbers, gguf.GGMLQuantizationType[kind]))
    weight, given = numbers_of(data, kind), inputs(2, 256, torch.bfloat16)
    assert (weight - torch.from_numpy(numbers)).abs().max() < 0.3
    compare(kernel.multiply(given, QuantizedMatrix(data, kind), None), given, weight)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q6_K"])
def test_order(kind):
    data = blocks(kind, 9, 2)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    matrix, weight = QuantizedMatrix(data, kind, order), numbers_of(data, kind)[order]
    for dtype in NEAR:
        assert torch.equal(matrix.dequantize(torch.empty(9, matrix.inner, dtype=dtype)), weight.to(dtype))
        index = torch.tensor([3, 0, 8, 3])
        assert torch.equal(matrix.rows(index, dtype), weight[index].to(dtype))
        for tokens in (1, 4):
            given = inputs(tokens, matrix.inner, dtype)
            compare(kernel.multiply(given, matrix, None), given, weight)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", ["BF16", "Q4_1", "Q8_0", "Q4_K"])
def test_threads(kind, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    data = blocks(kind, 701, 1024 // FORMATS[kind].size)
    matrix, weight = QuantizedMatrix(data, kind), numbers_of(data, kind)
    assert torch.equal(matrix.dequantize(torch.empty(701, 1024)), weight)
    for tokens in (1, 3):
        given = inputs(tokens, 1024, torch.bfloat16)
        compare(kernel.multiply(given[None], matrix, None)[0], given, weight)


@pytest.mark.skipif(not hasattr(mmap, "PROT_READ"), reason="the system has no pages to protect")
@pytest.mark.parametrize("kind", FORMATS)
def test_no_byte_behind_the_last_is_read(kind):
    page = mmap.PAGESIZE
    for count in sizes(kind):
        data = blocks(kind, 5, count)
        room = -(-data.numel() // page) * page
        memory = mmap.mmap(-1, room + page)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(begin + room), ctypes.c_size_t(page), 0) == 0
        at_end = torch.frombuffer(memory, dtype=torch.uint8, count=data.numel(), offset=room - data.numel())
        matrix = QuantizedMatrix(at_end.view(data.shape).copy_(data), kind)
        assert torch.equal(matrix.dequantize(torch.empty(5, matrix.inner)), numbers_of(data, kind))
        for dtype in NEAR:
            for tokens in (1, 3, 7):
                given = inputs(tokens, matrix.inner, dtype)
                compare(kernel.multiply(given, matrix, None), given, numbers_of(data, kind))


def test_numbers_that_are_not_finite_stay_with_their_row():
    data = blocks("Q4_K", 9, 2)
    matrix, given = QuantizedMatrix(data, "Q4_K"), inputs(5, 512, torch.bfloat16)
    right = kernel.multiply(given, matrix, None)
    given[3, 7] = torch.nan
    found = kernel.multiply(given, matrix, None)
    others = [0, 1, 2, 4]
    assert found[3].isnan().all() and torch.equal(found[others], right[others])


@needs_kernel
@pytest.mark.parametrize("narrow", ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_other_instructions_compute_the_same(narrow, tmp_path, monkeypatch):
    """As compiled without the processor's widest vectors, and without instructions for bfloat16 and float16."""
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1", narrow))
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))
    made = build.library.__wrapped__("quantized")
    if made.reason is not None:
        pytest.skip(f"no such option: {made.reason}")
    monkeypatch.setattr(build, "library", lambda name: made)
    kernel._multiply.cache_clear()
    kernel._dequantize.cache_clear()
    try:
        for kind in FORMATS:
            test_numbers(kind)
            check_products(kind, (5,), (1, 2, 7), sizes(kind)[1:])
    finally:
        kernel._multiply.cache_clear()
        kernel._dequantize.cache_clear()


@pytest.mark.parametrize("kind", FORMATS)
def test_without_a_compiler(kind, monkeypatch):
    monkeypatch.setattr(kernel, "built", lambda: build.Library(None, "switched off"))
    test_order(kind)


def test_copies_share_the_blocks_and_pickles_have_their_own():
    data = blocks("Q8_0", 6, 2)
    matrix = QuantizedMatrix(data, "Q8_0", torch.arange(6).flip(0))
    copied, pickled = copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix))
    wanted = matrix.dequantize(torch.empty(6, 64))
    assert torch.equal(copied.dequantize(torch.empty(6, 64)), wanted)
    data.zero_()
    assert all(each.dequantize(torch.empty(6, 64)).count_nonzero() == 0 for each in (matrix, copied))
    assert torch.equal(pickled.dequantize(torch.empty(6, 64)), wanted)


def test_wrong_rows_are_refused():
    data = blocks("Q8_0", 6, 2)
    with pytest.raises(ValueError, match="no whole number of Q4_0 blocks"):
        QuantizedMatrix(data, "Q4_0")
    with pytest.raises(ValueError, match="contiguous bytes"):
        QuantizedMatrix(data[:, :34], "Q8_0")
    for order in ([0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 4], [0]):
        with pytest.raises(ValueError, match="names each once"):
            QuantizedMatrix(data, "Q8_0", torch.tensor(order))


@needs_kernel
@pytest.mark.parametrize("row", [-1, 6])
def test_a_row_that_is_none_is_refused(row):
    with pytest.raises(IndexError, match=f"row {row} of a weight of 6 rows"):
        QuantizedMatrix(blocks("Q8_0", 6, 2), "Q8_0").rows(torch.tensor([0, row, 1]), torch.float32)


def test_few_tokens_are_those_of_the_interface():
    assert MOST_ROWS == 32 and set(FORMATS) <= set(gguf.GGMLQuantizationType.__members__)
    for kind, form in FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (form.size, form.nbytes)
        assert gguf.GGMLQuantizationType[kind] == form.number
