"""Memory of requests: an estimate for admission, and the default limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvsieve.cache.contract import MIN_ROOM
from kvsieve.errors import InputError, UnsupportedModelError
from kvsieve.hf.model.memory import shapes_of
from kvsieve.models.quantized import matrices_of

_INDEX_BYTES = _WIDE_BYTES = 4
_SHARE = 0.5


class KVBytes:
    """Bytes of a model's entries and states, by the shapes of its layers; all zero if unknown."""

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
        """Return the bytes of a conversation of `tokens` tokens without eviction."""
        return self._state + sum(size * (tokens if span is None else min(tokens, span)) for span, size in self._windows)

    def of_request(self, prompt: int, answer: int, answers: int = 1, documents: int = 0) -> int:
        """Return the most bytes that a request takes: its whole prompt until the plan has acted, answers and room.

        prompt, answer: tokens. documents: tokens of their own caches, with entries that are copied to their places.
        """
        room = max(MIN_ROOM, prompt // 8)
        copied = self.of(documents) if documents else 0
        return self.of(prompt) + copied + answers * self.of(answer + room)


def check_room(model: Any, kv_bytes: int | None) -> None:
    """Raise InputError for a limit on conversations' bytes that no request fits."""
    least = KVBytes(model).of_request(1, 1)
    if kv_bytes is not None and kv_bytes < least:
        raise InputError(
            f"--kv-memory has {kv_bytes:,} bytes for the KV cache of running requests, and one of a single token needs "
            f"{least:,}; raise it"
        )


def free_bytes(model: Any) -> int | None:
    """Return the default bytes for conversations: half of the free memory of the model's device; None if unknown."""
    device: torch.device = model.device
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            # The system counts pages of mapped weights as available.
            mapped = sum(matrix.nbytes for matrix in matrices_of(model))
            return int(max(0, int(line.split()[1]) * 1024 - mapped) * _SHARE)
    return None
