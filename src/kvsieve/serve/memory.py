"""Memory that requests take: estimated before they are let in, and what there is for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.model.memory import shapes_of

_INDEX_BYTES = _WIDE_BYTES = 4
_SHARE = 0.5


class KVBytes:
    """Bytes that a model's entries and states take, by the shapes of its layers; all zero where they are not known."""

    def __init__(self, model: Any) -> None:
        element = model.dtype.itemsize
        try:
            shapes = shapes_of(model)
        except UnsupportedModelError:
            shapes = ()
        self._windows = [
            (shape.kind.span, shape.entry_elements * element + shape.heads * _INDEX_BYTES)
            for shape in shapes
            if shape.kind.source is None
        ]
        self._state = sum(s.state_elements * element + s.wide_state_elements * _WIDE_BYTES for s in shapes)

    def of(self, tokens: int) -> int:
        """Bytes of a conversation of so many tokens, all kept."""
        return self._state + sum(each * (tokens if span is None else min(tokens, span)) for span, each in self._windows)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that conversations may take by default: half of the device's free memory; None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * _SHARE)
    return None
