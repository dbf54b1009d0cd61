"""Compiling kernels: by the compilers there are, with what each of them lacks, and what is said where none helps."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from typing import get_args

import pytest
import torch

from kvsieve.kernels.cpu import build, layers, products

# What a compiler without OpenMP says, as Apple's does.
NO_OPENMP = """case "$*" in *-fopenmp*) echo "clang: error: unsupported option '-fopenmp'" >&2; exit 1 ;; esac
exec gcc "$@" """
# Compiles for an OpenMP that is nowhere to be linked, as clang does without libomp.
NO_LIBRARY = """case "$*" in
*-fopenmp*-c\\ *) exec gcc -include {header} "$@" ;;
*-shared*-fopenmp*) echo "/usr/bin/ld: cannot find -lomp: No such file or directory" >&2
    echo "clang: error: linker command failed with exit code 1 (use -v to see invocation)" >&2; exit 1 ;;
esac
exec gcc "$@" """
# Counts its runs beside itself.
COUNTED = 'echo run >> "$0.runs"; exec gcc "$@"'


def runs(path: str) -> int:
    counted = f"{path}.runs"
    if not os.path.exists(counted):
        return 0
    with open(counted) as file:
        return len(file.readlines())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.parametrize("name", get_args(build.Name))
def test_every_source_compiles(name):
    """Without its kernel everything goes on in plain torch, and no other test would tell."""
    assert build.library(name).reason is None


@pytest.mark.parametrize(
    "variables, told",
    [
        ({"KVSIEVE_KERNELS": "0"}, "switched off: KVSIEVE_KERNELS=0"),
        ({"PATH": "", "CC": " "}, "there is no C compiler: install gcc"),
        ({"CC": "/no/such/compiler"}, "/no/such/compiler made no kernels: [Errno 2] No such file"),
        ({"CC": "false"}, "false made no kernels: exit status 1, and no message"),
        ({"CC": "true"}, "true made no kernels: "),
        ({"CC": "gcc 'half"}, "gcc 'half made no kernels: No closing quotation"),
        ({"CC": "gcc --no-such-option"}, "error: unrecognized command-line option"),
    ],
)
def test_without_kernels_there_is_a_reason(machine, monkeypatch, variables, told):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [build.library(name) for name in ("layers", "codes")]
    assert all(told in each.reason and each.loaded is None for each in found)
    # Whoever switches them off knows.
    assert len(warned) == ("KVSIEVE_KERNELS" not in variables)
    assert all(str(each.message).endswith(found[0].reason) for each in warned)


def test_the_first_error_is_shown(machine, monkeypatch, tmp_path):
    """GCC's last line is a caret below the source."""
    (tmp_path / "codes.c").write_text('#warning "of no importance"\nint one(void) { return nothing; }\n')
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    with pytest.warns(UserWarning, match="kvsieve: no compiled kernels"):
        reason = build.library("codes").reason
    assert "codes.c:2:" in reason and "error:" in reason and "nothing" in reason and "\n" not in reason


@pytest.mark.parametrize("command", ["gcc -m64 -DUNUSED='a b'", "env UNUSED=1 gcc", "{folder}/with spaces"])
def test_a_compiler_with_arguments_a_wrapper_and_a_path_with_spaces(machine, script, monkeypatch, command):
    if "-m64" in command and os.uname().machine != "x86_64":
        pytest.skip("-m64 is an option of x86")
    script('exec gcc "$@"', "with spaces")
    monkeypatch.setenv("CC", command.format(folder=machine))
    assert build.library("layers").reason is None


def same_as_torch(library: build.Library, monkeypatch) -> None:
    monkeypatch.setattr(layers, "function", build.function)
    monkeypatch.setattr(build, "library", lambda name: library)
    layers._kernels.cache_clear()
    x, weight = torch.randn(3, 5, 64), torch.rand(64)
    try:
        ours = layers.rms_norm(x, weight, 1e-6)
    finally:
        layers._kernels.cache_clear()
    torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


@pytest.mark.parametrize("text", [NO_OPENMP, NO_LIBRARY], ids=["refused", "no-library"])
def test_without_openmp_kernels_run_on_one_thread(machine, script, monkeypatch, text):
    header = machine / "omp.h"
    header.write_text("extern int nowhere_to_be_found(void);\nint (*used)(void) = nowhere_to_be_found;\n")
    monkeypatch.setenv("CC", script(text.format(header=header)))
    found = build.library("layers")
    assert found.reason is None and not found.on_threads and "on one thread" in found.status
    # Torch's products, on all threads, are faster then.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.warns(UserWarning, match="no OpenMP"):
        assert "no OpenMP, and torch has 2 threads" in products.built().reason
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert products.built().reason is None
    same_as_torch(found, monkeypatch)


def test_with_openmp_they_run_on_threads(machine):
    found = build.library("layers")
    assert found.on_threads and "thread" not in found.status


def test_a_compiler_that_does_not_know_its_processor(machine, script, monkeypatch):
    """Apple's before -march=native, and a GCC that knows neither option."""
    refuses = 'case "$*" in *-m*=native*) echo "error: unknown value native" >&2; exit 1 ;; esac\nexec gcc "$@"'
    monkeypatch.setenv("CC", script(refuses))
    assert build.library("layers").reason is None


def test_processes_that_compile_at_once_do_not_meet(machine):
    found: list[build.Library] = []
    threads = [threading.Thread(target=lambda: found.append(build.library("layers"))) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    kept = sorted(path.suffix for path in (machine / "cache/kernels").iterdir())
    assert [each.reason for each in found] == [None] * 3 and kept == [".seconds", ".so"]


def test_a_file_is_for_one_processor_and_made_again_when_it_is_damaged(machine, script, monkeypatch):
    compiler = script(COUNTED)
    monkeypatch.setenv("CC", compiler)
    first = build.library("layers")
    count = runs(compiler)
    again = build.library("layers")
    assert first.compiled and not again.compiled and runs(compiler) == count
    # What it took is known to those who find it ready.
    assert again.seconds == pytest.approx(first.seconds, abs=0.01) and "compiled once in" in again.status
    monkeypatch.setattr(build, "processor", lambda: "another")
    assert build.library("layers").compiled
    assert len(list((machine / "cache/kernels").glob("*.so"))) == 2
    damaged = machine / "cache/kernels/damaged.so"
    damaged.write_bytes(b"half a libr")
    damaged.chmod(0o700)
    assert build._load_compiled(damaged) is None
