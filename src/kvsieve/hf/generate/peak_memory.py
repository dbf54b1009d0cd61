"""Peak memory of a block of code."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from kvsieve.devices import return_freed_memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Peak:
    """Peak memory in `bytes`, set at the end of the block; None if the system does not report it."""

    bytes: int | None = None


@contextlib.contextmanager
def measure_peak(device: torch.device) -> Iterator[Peak]:
    """Peak memory while the block runs, weights included: allocated on a CUDA device, resident on the CPU (Linux).

    Resident memory includes the pages of mapped weight files that are in memory.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    resets = _reset_resident_peak()
    yield peak
    peak.bytes = resident("VmHWM") if resets else None


def _reset_resident_peak() -> bool:
    # Freed memory that malloc keeps would count as this block's.
    gc.collect()
    return_freed_memory()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def resident(field: str = "VmRSS") -> int | None:
    """Return the resident bytes of this process ("VmHWM": their peak), or None if the system does not report them."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
