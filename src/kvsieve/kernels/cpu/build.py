"""Compiling the C kernels, once per machine."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

# Sums may be taken in any order, which lets the compiler use vectors; nothing else of IEEE arithmetic is given up.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
)
_SOURCE = Path(__file__).parent / "packed.c"


class Library:
    """The compiled kernels, or why there are none. reason: None where there are."""

    def __init__(self, loaded: ctypes.CDLL | None, reason: str | None) -> None:
        self.loaded, self.reason = loaded, reason


@functools.cache
def library() -> Library:
    """Load the kernels, compiling them first where that has not been done: a second or two, once per machine.

    The file lies in ``KVSIEVE_CACHE``, or in kvsieve's folder of the user's cache. ``KVSIEVE_KERNELS=0`` switches them
    off.
    """
    if os.environ.get("KVSIEVE_KERNELS") == "0":
        return Library(None, "switched off: KVSIEVE_KERNELS=0")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        return Library(None, "there is no C compiler: install gcc")
    told = "\n".join((_SOURCE.read_text(), *_FLAGS, compiler, platform.machine(), _processor(), torch.__version__))
    path = _folder() / f"packed-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    try:
        return Library(_loaded(compiler, path), None)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Library(
            None, f"{compiler} made no kernels: {detail.strip().splitlines()[-1] if detail.strip() else error}"
        )


def _loaded(compiler: str, path: Path) -> ctypes.CDLL:
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            # A damaged file, or one made where there is another C library.
            pass
    _compile(compiler, path)
    return ctypes.CDLL(str(path))


def _folder() -> Path:
    given = os.environ.get("KVSIEVE_CACHE")
    if given:
        return Path(given) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsieve" / "kernels"


def _processor() -> str:
    """Features of the processor, by which ``-march=native`` goes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, path: Path) -> None:
    """Compile to a file of its own first: processes that do so at once do not meet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, out = f"{folder}/packed.o", f"{folder}/packed.so"
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=300)
        run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", made])
        # OpenMP comes from torch, whose threads they then are; a library of its own would have others.
        run([compiler, "-shared", made, "-o", out, "-lm"])
        try:
            ctypes.CDLL(out)
        except OSError:
            run([compiler, "-shared", "-fopenmp", made, "-o", out, "-lm"])
        os.replace(out, path)
