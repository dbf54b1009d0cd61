"""Deciding what is packed and fused where nobody has said: where memory allows it, and where it is clearly faster."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.display import mebibytes
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.hf.decode.packed_weights import PackedLinears
from kvsieve.hf.decode.products import multiplied
from kvsieve.kernels.cpu.build import cache_folder, processor

_log = logging.getLogger(__name__)

# Smaller weights lie in the processor's cache and take little time.
_LEAST = 32 << 20
# Copies may take this part of the memory that is free.
_PART = 4
# Packed weights are taken where they need less than this part of the time: what is nearly as fast is not told apart.
_CLEARLY = 0.9
# Bytes of weights that are timed: more than caches hold.
_TIMED, _ROUNDS = 64 << 20, 5


def by_default(
    decoder: nn.Module, output: nn.Module | None, *, alone: bool
) -> tuple[str, PackedLinears | None, FusedModules | None]:
    """Return the engine that "auto" means, and what it replaces. alone: heads are not divided, nor layers."""
    if next((each.device.type for each in decoder.parameters()), "cpu") == "cuda":
        return "graph", None, None
    large = sum(each.nbytes for each in decoder.parameters()) >= _LEAST
    packed = packed_by_default(decoder, output) if alone else None
    fused = fused_or_none(decoder) if alone and large else None
    return "packed" if packed is not None else "fused" if fused is not None else "eager", packed, fused


def packed_by_default(decoder: nn.Module, output: nn.Module | None) -> PackedLinears | None:
    """Return a CPU's packed weights where they are of use; None where they are not, or nowhere to be had."""
    try:
        packed = PackedLinears(decoder, output)
    except ValueError:
        return None
    reason = why_not_by_default(packed.layers)
    if reason is not None:
        _log.info("weights are not packed: %s", reason)
    return packed if reason is None else None


def fused_or_none(decoder: nn.Module) -> FusedModules | None:
    """Return a decoder's fused operations; None where there are none."""
    try:
        return FusedModules(decoder)
    except ValueError as reason:
        _log.info("no operations are fused: %s", reason)
        return None


def why_not_by_default(layers: Sequence[nn.Linear]) -> str | None:
    """Reason why these layers' weights are not packed unasked; None where they are.

    What packed weights save is measured once per machine, version of torch, number of threads and shapes of layers, a
    fifth of a second, and kept in ``KVSIEVE_CACHE`` or in kvsieve's folder of the user's cache.
    """
    weights = [module.weight for module in layers]
    size = sum(weight.nbytes for weight in weights)
    if size < _LEAST:
        return f"the weights are {mebibytes(size)}, too small to matter"
    free = free_memory()
    if free is None or size * _PART > free:
        told = "an unknown number of bytes" if free is None else mebibytes(free)
        return f"copies of the weights would take {mebibytes(size)} of {told} free"
    ratio = _kept_ratio([weight.detach() for weight in weights])
    if ratio >= _CLEARLY:
        return f"products with packed weights take {ratio:.2f} of the time of plain ones here"
    return None


def free_memory() -> int | None:
    """Bytes that this process may still allocate: of the machine, or of its control group; None where unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(max(int(limit) - int(used), 0))
    return min(found, default=None)


def _kept_ratio(weights: Sequence[Tensor]) -> float:
    shapes = sorted({tuple(weight.shape) for weight in weights})
    facts = {
        "processor": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shapes": shapes,
        "isa": [os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")],
    }
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return _measured_once(cache_folder() / f"weights-{digest}.json", lambda: measured_ratio(weights))


_KNOWN: dict[Path, float] = {}


def _measured_once(path: Path, measure: Callable[[], float]) -> float:
    if path not in _KNOWN:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            _KNOWN[path] = float(json.loads(path.read_text())["packed_over_plain"])
    if path not in _KNOWN:
        _KNOWN[path] = round(measure(), 3)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all, beside other processes that do so.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                file.write(json.dumps({"packed_over_plain": _KNOWN[path]}) + "\n")
            os.replace(file.name, path)
    return _KNOWN[path]


@torch.no_grad()
def measured_ratio(weights: Sequence[Tensor]) -> float:
    """Time of products of a token with packed weights over that with plain ones, of as many as caches cannot hold."""
    some: list[Tensor] = []
    for weight in sorted(weights, key=Tensor.numel):
        if not some or sum(each.nbytes for each in some) + weight.nbytes <= _TIMED:
            some.append(weight)
    given = [torch.rand(1, weight.shape[1], dtype=weight.dtype) for weight in some]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 1) for weight in some]
    best = [math.inf, math.inf]
    for turn in range(_ROUNDS + 1):
        for at, (multiply, those) in enumerate(((multiplied, packed), (F.linear, some))):
            began = time.perf_counter()
            for one, weight in zip(given, those, strict=True):
                multiply(one, weight)
            if turn:
                best[at] = min(best[at], time.perf_counter() - began)
    return best[0] / best[1]
