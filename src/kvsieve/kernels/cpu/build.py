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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

Name = Literal["codes", "layers", "mass", "packed", "pages", "products", "prompt", "reading", "token"]

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
_FOLDER = Path(__file__).parent


class Library:
    """Compiled kernels, or why there are none.

    Attributes:
        loaded: the library; None where there is none.
        reason: why not; None where there is one.
        seconds: what compiling it took, whichever process did it; None where that is not known.
        compiled: True where this process compiled it, False where it lay ready.
    """

    def __init__(
        self, loaded: ctypes.CDLL | None, reason: str | None, seconds: float | None = None, compiled: bool = False
    ) -> None:
        self.loaded, self.reason, self.seconds, self.compiled = loaded, reason, seconds, compiled

    @property
    def told(self) -> str:
        """Tell for people whether it is used, and what it has cost once."""
        if self.reason is not None:
            return f"not used, {self.reason}"
        return "used" if self.seconds is None else f"used, compiled once in {self.seconds:.1f} s"


@functools.cache
def library(name: Name) -> Library:
    """Load the kernels of one source, compiling them first where that has not been done: seconds, once per machine.

    The file lies in ``KVSIEVE_CACHE``, or in kvsieve's folder of the user's cache. ``KVSIEVE_KERNELS=0`` switches them
    off.
    """
    if os.environ.get("KVSIEVE_KERNELS") == "0":
        return Library(None, "switched off: KVSIEVE_KERNELS=0")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        return Library(None, "there is no C compiler: install gcc")
    source = _FOLDER / f"{name}.c"
    texts = source.read_text(), *(each.read_text() for each in sorted(_FOLDER.glob("*.h")))
    told = "\n".join((*texts, *_FLAGS, compiler, platform.machine(), processor(), torch.__version__))
    path = cache_folder() / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    try:
        return _loaded(compiler, source, path)
    except (OSError, subprocess.SubprocessError) as error:
        printed = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        detail = printed or str(error)
        return Library(
            None, f"{compiler} made no kernels: {detail.strip().splitlines()[-1] if detail.strip() else error}"
        )


def function(name: Name, symbol: str, *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    """Return a function of a library that is loaded.

    Args:
        name: the library.
        symbol: the function's name.
        arguments: types of its arguments; a pointer and a number if left out: what to do, and threads.
        returns: type of its result; None for none.
    """
    loaded = library(name).loaded
    assert loaded is not None
    found: Any = getattr(loaded, symbol)
    found.argtypes, found.restype = arguments or (ctypes.c_void_p, ctypes.c_int64), returns
    return found


def _loaded(compiler: str, source: Path, path: Path) -> Library:
    times = path.with_suffix(".seconds")
    if path.exists():
        try:
            return Library(ctypes.CDLL(str(path)), None, _number_in(times))
        except OSError:
            # A damaged file, or one made where there is another C library.
            pass
    began = time.perf_counter()
    _compile(compiler, source, path)
    seconds = time.perf_counter() - began
    times.write_text(f"{seconds:.2f}\n")
    return Library(ctypes.CDLL(str(path)), None, seconds, compiled=True)


def _number_in(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def cache_folder() -> Path:
    """Return the folder of what is made once per machine."""
    given = os.environ.get("KVSIEVE_CACHE")
    if given:
        return Path(given) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsieve" / "kernels"


def processor() -> str:
    """Features of the processor, by which ``-march=native`` goes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile to a file of its own first: processes that do so at once do not meet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, out = f"{folder}/kernels.o", f"{folder}/kernels.so"
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=300)
        run([compiler, *_FLAGS, "-c", str(source), "-o", made])
        # OpenMP comes from torch, whose threads they then are; a library of its own would have others.
        run([compiler, "-shared", made, "-o", out, "-lm"])
        try:
            ctypes.CDLL(out)
        except OSError:
            run([compiler, "-shared", "-fopenmp", made, "-o", out, "-lm"])
        os.replace(out, path)
