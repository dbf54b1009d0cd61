"""Compilers and processors that are not here: each source compiles for them, and what can be run gives the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from typing import get_args

import pytest
import torch

from kvsieve.kernels.cpu import build

# Compiled, not run: of oldest systems, of other processors and of Windows (Debian's packages gcc-11, clang,
# gcc-aarch64-linux-gnu with libc6-dev-arm64-cross, gcc-mingw-w64-x86-64).
COMPILERS = (
    "gcc-11 -march=x86-64",
    "gcc-11 -march=sapphirerapids",
    "gcc -march=x86-64-v3",
    "clang -march=x86-64-v4",
    "clang --target=aarch64-linux-gnu",
    "aarch64-linux-gnu-gcc",
    "x86_64-w64-mingw32-gcc -march=x86-64-v3 -Wa,-muse-unaligned-vector-move",
)
FLOAT16 = """
#include "float16.h"
void read_all(const Float16 *from, int n, float *vectors, float *each) {
    halves(from, n, vectors);
    for (int i = 0; i < n; i++) each[i] = of_float16(from[i]);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_source_compiles_elsewhere(compiler, tmp_path):
    words = compiler.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}")
    flags = [flag for flag in build._FLAGS if not flag.startswith(("-O", "-march"))]
    for name in get_args(build.Name):
        source = build._FOLDER / f"{name}.c"
        command = [*words, "-O0", *flags, "-Werror=implicit", "-c", str(source), "-o", str(tmp_path / "made.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unknown value" in done.stderr or "bad value" in done.stderr:
            pytest.skip(f"{compiler}: {done.stderr.splitlines()[0]}")
        assert done.returncode == 0, build._first_error(done.stderr)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("flags", ["-march=native", "-march=native -mno-avx512f", ""], ids=["all", "256", "none"])
def test_every_number_of_float16(tmp_path, flags):
    """With the instructions of the processor, and by the bits of each."""
    source, made = tmp_path / "all.c", tmp_path / "all.so"
    source.write_text(FLOAT16)
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-I{build._FOLDER}", *flags.split(), str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized" in done.stderr:
        pytest.skip("the processor is another")
    assert done.returncode == 0, done.stderr
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)[:-3].clone()
    vectors, each = torch.empty(2, len(halves))
    function = ctypes.CDLL(str(made)).read_all
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    function(halves.data_ptr(), len(halves), vectors.data_ptr(), each.data_ptr())
    for found in (vectors, each):
        torch.testing.assert_close(found, halves.float(), rtol=0, atol=0, equal_nan=True)
