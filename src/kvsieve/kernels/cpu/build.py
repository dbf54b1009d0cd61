"""Compilation of the C kernels, once per machine."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from kvsieve.folders import make_private, why_not_private
from kvsieve.kernels.cpu.folder import cache_folder as cache_folder
from kvsieve.kernels.cpu.folder import kernel_folders
from kvsieve.lazy import torch

Name = Literal["codes", "layers", "mass", "packed", "pages", "products", "prompt", "quantized", "reading", "token"]

# Sums may be reordered, which lets the compiler use vectors; all other IEEE rules hold.
_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    # GCC aligns the stack of Windows to 16 bytes and reads wider vectors from it as if aligned to their size.
    *(("-Wa,-muse-unaligned-vector-move",) if sys.platform == "win32" else ()),
)
# Replacements of flags that a compiler does not know: Apple's has no OpenMP, older ones for ARM no -march=native.
_INSTEAD: dict[str, str | None] = {"-fopenmp": None, "-march=native": "-mcpu=native"}
_FOLDER = Path(__file__).parent
# Reasons for missing kernels that this process has warned of.
_reasons: list[str] = []


class Library:
    """Compiled kernels, or the reason why there are none.

    Attributes:
        loaded: the library, or None.
        reason: why there is none, or None.
        seconds: time that compiling took, in any process; None if unknown.
        compiled: True if this process compiled it, False if it was loaded from the cache.
    """

    def __init__(
        self, loaded: ctypes.CDLL | None, reason: str | None, seconds: float | None = None, compiled: bool = False
    ) -> None:
        self.loaded = loaded
        self.reason = reason
        self.seconds = seconds
        self.compiled = compiled

    @property
    def on_threads(self) -> bool:
        return self.loaded is not None and bool(self.loaded.on_threads())

    @property
    def status(self) -> str:
        if self.reason is not None:
            return f"not used, {self.reason}"
        cost = "" if self.seconds is None else f", compiled once in {self.seconds:.1f} s"
        return f"used{cost}{'' if self.on_threads else ', on one thread: the compiler has no OpenMP'}"


@functools.cache
def library(name: Name) -> Library:
    """Load the kernels of one source, compiling them first if needed: seconds, once per machine.

    They are cached in `cache_folder`, or among the user's temporary files if others may write to that folder or code in
    it cannot run. ``KVSIEVE_KERNELS=0`` switches them off; ``CC`` names another compiler, optionally with arguments.
    Warns once per process if there are none.
    """
    if os.environ.get("KVSIEVE_KERNELS") == "0":
        return Library(None, "switched off: KVSIEVE_KERNELS=0")
    return _with_warning(_load_or_compile(name))


def _with_warning(found: Library) -> Library:
    if found.reason is not None and not _reasons:
        _reasons.append(found.reason)
        warnings.warn(
            f"kvsieve: no compiled kernels, so plain torch computes more slowly (`kvsieve doctor`): {found.reason}",
            stacklevel=3,
        )
    return found


def _load_or_compile(name: Name) -> Library:
    compiler = os.environ.get("CC", "").strip() or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        return Library(None, "there is no C compiler: install gcc")
    folders = kernel_folders()
    if not folders.usable:
        return Library(None, f"compiled kernels have no folder: {'; '.join(folders.refused)}")
    source = _FOLDER / f"{name}.c"
    texts = source.read_text(), *(header.read_text() for header in sorted(_FOLDER.glob("*.h")))
    identity = "\n".join((*texts, *_FLAGS, compiler, platform.machine(), processor(), torch.__version__))
    paths = [folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so" for folder in folders.usable]
    for path in paths:
        kernels = _load_compiled(path)
        if kernels is not None:
            return kernels
    reason = ""
    for path in paths:
        try:
            return _compile_and_load(compiler, source, path)
        except subprocess.CalledProcessError as error:
            reason = _first_error(error.stderr) or f"exit status {error.returncode}, and no message"
            break
        except (ValueError, subprocess.SubprocessError) as error:
            reason = str(error)
            break
        except OSError as error:
            # Another folder may have room, or allow code to run.
            reason = str(error)
    return Library(None, f"{compiler} made no kernels: {reason}")


def threaded(name: Name) -> Library:
    """Return `library`, but no single-threaded kernels if torch uses several threads."""
    found = library(name)
    threads = torch.get_num_threads()
    if found.loaded is None or found.on_threads or threads == 1:
        return found
    return _with_warning(Library(None, f"the compiler has no OpenMP, and torch has {threads} threads"))


def function(name: Name, symbol: str, *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    """Return a function of a loaded library.

    Args:
        name: the library.
        symbol: the function's name.
        arguments: types of its arguments (default: a pointer to the job, and the number of threads).
        returns: type of its result; None for none.
    """
    loaded = library(name).loaded
    assert loaded is not None
    found: Any = getattr(loaded, symbol)
    found.argtypes = arguments or (ctypes.c_void_p, ctypes.c_int64)
    found.restype = returns
    return found


def address_of(found: Callable[..., Any]) -> int:
    """Return the address of what `function` returned, for kernels that call it."""
    pointer: Any = found
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _load_compiled(path: Path) -> Library | None:
    """Load a cached library; return None if the file is damaged or other users could have written it."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode) or why_not_private(path) is not None:
            return None
        return Library(ctypes.CDLL(str(path)), None, _number_in(path.with_suffix(".seconds")))
    except OSError:
        return None


def _compile_and_load(compiler: str, source: Path, path: Path) -> Library:
    began = time.perf_counter()
    _compile(compiler, source, path)
    seconds = time.perf_counter() - began
    path.with_suffix(".seconds").write_text(f"{seconds:.2f}\n")
    return Library(ctypes.CDLL(str(path)), None, seconds, compiled=True)


def _number_in(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def processor() -> str:
    """Return the processor's features, which ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile to a private file first, so that concurrent processes do not interfere."""
    make_private(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        tool = _CompilerCommand(compiler, Path(folder))
        flags = _FLAGS
        try:
            compiled = tool.compile(source, flags)
        except subprocess.CalledProcessError:
            flags = tool.accepted(_FLAGS)
            if flags == _FLAGS:
                raise
            compiled = tool.compile(source, flags)
        # OpenMP comes from torch, to share its threads; a separate library would have its own.
        try:
            out = tool.link(compiled)
        except (OSError, subprocess.CalledProcessError):
            if "-fopenmp" not in flags:
                raise
            try:
                out = tool.link(compiled, "-fopenmp")
            except (OSError, subprocess.CalledProcessError):
                out = tool.link(tool.compile(source, tuple(flag for flag in flags if flag != "-fopenmp")))
        os.chmod(out, 0o700)
        os.replace(out, path)


class _CompilerCommand:
    """Compiler named by ``CC``, with its arguments and an output folder."""

    def __init__(self, command: str, folder: Path) -> None:
        is_path = shutil.which(command) is not None
        self._words = [command] if is_path else shlex.split(command, posix=sys.platform != "win32")
        self._folder = folder

    def compile(self, source: Path, flags: tuple[str, ...]) -> Path:
        """Compile to an object file. Raises CalledProcessError."""
        path = self._folder / "kernels.o"
        self._run(*flags, "-c", str(source), "-o", str(path))
        return path

    def link(self, compiled: Path, *flags: str) -> Path:
        """Link a library that loads here. Raises CalledProcessError, or OSError if it does not load."""
        out = self._folder / f"kernels{len(flags)}.so"
        later = ("-Wl,-undefined,dynamic_lookup",) if sys.platform == "darwin" else ()
        self._run("-shared", *later, *flags, str(compiled), "-o", str(out), "-lm")
        ctypes.CDLL(str(out))
        return out

    def accepted(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Return the flags, replacing or dropping those that the compiler refuses."""
        found = (flag if self._accepts(flag) else _INSTEAD.get(flag, flag) for flag in flags)
        return tuple(flag for flag in found if flag in flags or (flag is not None and self._accepts(flag)))

    def _accepts(self, flag: str) -> bool:
        empty = self._folder / "empty.c"
        empty.write_text("")
        try:
            self.compile(empty, (flag,))
        except subprocess.CalledProcessError:
            return False
        return True

    def _run(self, *arguments: str) -> None:
        # English messages, so that the error among them can be found.
        environment = {**os.environ, "LC_ALL": "C"}
        subprocess.run(
            [*self._words, *arguments],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )


def _first_error(printed: str) -> str | None:
    """Return the first error among a compiler's messages, or the first line of a linker's; None without messages."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line and not line.startswith("collect2:")]
    return next(iter(errors or lines), None)
