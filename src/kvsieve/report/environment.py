"""The stamp that every measured number carries."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from kvsieve.version import __version__


def environment() -> dict[str, Any]:
    """Versions, processor, device, threads, time (UTC) and, in a checkout, the commit measured (JSON-ready).

    In a copy of a checkout without its history the variable KVSIEVE_COMMIT names the commit.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "kvsieve": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with "+" when tracked files of the package differ from it; None outside a checkout."""
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
