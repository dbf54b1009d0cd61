"""The environment stamp of every measurement, and the writer of results."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from kvsieve.devices import cpu_kind
from kvsieve.folders import write_whole
from kvsieve.version import __version__

UNRECORDED = "not recorded"
WEIGHTS = (".safetensors", ".bin", ".gguf")


def environment(model: Any = None) -> dict[str, Any]:
    """Return versions, processor and its kind, device, time (UTC), weights, command and, in a checkout, the commit.

    JSON-ready. In a copy of a checkout without its history the variable KVSIEVE_COMMIT names the commit.

    Args:
        model: the model measured, or its directory or file; None for none.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "kvsieve": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{_processor()}, {cpu_kind()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "weights": None if model is None else weights_digest(model),
        "command": _command(),
    }


def _command() -> str:
    """Return this process's command line without folders in its paths."""
    return " ".join(Path(argument).name if os.path.isabs(argument) else argument for argument in sys.argv)


def weights_digest(model: Any) -> str:
    """Return the names and sha256 of a checkpoint's weight files, as sha256sum prints them.

    Args:
        model: a transformers model, or the directory or file of its checkpoint.

    Returns:
        "NAME sha256:HEX", comma-separated; a hub id with its revision if there are no local files; "random" for a model
        without a checkpoint.
    """
    config = None if isinstance(model, (str, os.PathLike)) else model.config
    source = str(model if config is None else config._name_or_path or "")
    if not source:
        return "random"
    place = Path(os.path.expanduser(source))
    files = [place] if place.is_file() else sorted(file for form in WEIGHTS for file in place.glob(f"*{form}"))
    if not files:
        revision = None if config is None else config._commit_hash
        return f"{source} revision:{revision}" if revision else UNRECORDED
    return ", ".join(f"{file.name} sha256:{_sha256(file)}" for file in files)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a measurement as JSON, atomically.

    Args:
        path: the file; its folder is created.
        result: JSON-ready, with full settings and at least one `environment()`.

    Raises:
        ValueError: no part of it has a stamp.
        OSError: it cannot be written.
    """
    if not list(stamps(result)):
        raise ValueError(f"a result for {path.name} without environment(model): nothing would say what was measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")


def stamps(result: Any) -> Iterator[dict[str, Any]]:
    if isinstance(result, dict) and {"kvsieve", "commit"} <= result.keys():
        yield result
    elif isinstance(result, (dict, list)):
        for part in result.values() if isinstance(result, dict) else result:
            yield from stamps(part)


def _sha256(file: Path) -> str:
    status = file.stat()
    return _digest(file, status.st_size, status.st_mtime_ns)


@functools.cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Hash a file. size, changed: its current state, so that the cached digest of an older file is not used."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the checkout's commit, with "+" if tracked files of the package were changed; None outside a checkout."""
    if "KVSIEVE_COMMIT" in os.environ:
        return os.environ["KVSIEVE_COMMIT"]

    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parents[1]
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
