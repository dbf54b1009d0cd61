"""Defaults for a model's device, and its dtype, "auto"."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class DtypeChoice:
    """Dtype that "auto" selects on a device. reason: one clause."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """Such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def default_device() -> str:
    """Return "cuda" if there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def auto_dtype(device: str | torch.device | None = None) -> DtypeChoice:
    """Return bfloat16 if the device computes it natively, else float16 if that is fast, else float32.

    A CPU without bfloat16 instructions converts every number and is often several times slower than with float32. While
    a plan is attached, linear layers convert once for many tokens (`hf/decode/linears.py`), so that a model that fits
    into memory in bfloat16 only is not as slow.

    Args:
        device: of the model; default: `default_device`.
    """
    device = torch.device(default_device() if device is None else device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has = f"the GPU has compute capability {major}.{minor}"
        if major >= 8:
            return DtypeChoice(torch.bfloat16, f"{has}, native bfloat16")
        return DtypeChoice(torch.float16, f"{has}, native bfloat16 begins with 8.0")
    if device.type == "xpu":
        return DtypeChoice(torch.bfloat16, "Intel's GPUs compute bfloat16 natively")
    if device.type == "mps":
        return DtypeChoice(torch.float16, "Apple's GPUs are fastest in float16")
    if device.type == "cpu":
        return _of_cpu()
    return DtypeChoice(torch.float32, f"nothing is known about bfloat16 on {device.type}")


# Kinds of CPU, by what matters for attention and for products with weights.
AMX = "AMX"
AVX512_BF16 = "AVX-512 BF16"
AVX512 = "AVX-512 without bfloat16"
AVX2 = "AVX2"
ARM_BF16 = "ARM with bfloat16"
ARM = "ARM"


def cpu_kind() -> str:
    """Return the kind of this CPU, or the lesser one that the environment limits torch and oneDNN to.

    The variables are ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``; other architectures return their name.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return ARM_BF16 if cpu_has("bf16") else ARM
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return platform.machine() or "unknown"
    level = torch.backends.cpu.get_cpu_capability()
    if level in ("DEFAULT", "AVX2"):
        return AVX2 if level == "AVX2" else "no AVX2"
    if cpu_has("amx_bf16"):
        return AMX
    return AVX512_BF16 if cpu_has("avx512_bf16") else AVX512


def cpu_has(feature: str) -> bool:
    """Return whether this CPU has a feature, by torch's name: "avx512_bf16", "amx_bf16", "bf16" (ARM).

    False for a feature that ``ONEDNN_MAX_CPU_ISA`` disables in oneDNN, which computes in bfloat16.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if feature in _ONEDNN and not any(part in most for part in ("ALL", "DEFAULT", *_ONEDNN[feature])):
        return False
    return bool(_cpu_features().get(feature, False))


def cpu_computes_bfloat16() -> bool:
    """Return whether this CPU has instructions for matrix products in bfloat16."""
    return any(cpu_has(feature) for feature in _NATIVE)


# Parts of the names of the instruction sets under which oneDNN uses a feature.
_ONEDNN = {"amx_bf16": ("AMX",), "avx512_bf16": ("AMX", "AVX10", "CORE_BF16", "CORE_FP16")}


def _of_cpu() -> DtypeChoice:
    if sys.platform == "darwin":
        return DtypeChoice(torch.float32, "torch has no native bfloat16 for Apple's processors")
    found = [label for name, label in _NATIVE.items() if cpu_has(name)]
    if not found:
        lacks = "bf16 instructions" if platform.machine() in ("aarch64", "arm64") else "AVX-512 BF16 or AMX"
        return DtypeChoice(torch.float32, f"the processor has no native bfloat16 ({lacks})")
    level = torch.backends.cpu.get_cpu_capability()
    if level in ("DEFAULT", "AVX2"):
        return DtypeChoice(torch.float32, f"torch uses no more of the processor than {level} here, without bfloat16")
    if not torch.backends.mkldnn.is_available():
        return DtypeChoice(torch.float32, "this torch is built without oneDNN, which computes in bfloat16")
    return DtypeChoice(torch.bfloat16, f"the processor computes it natively ({' and '.join(found)})")


_NATIVE = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "ARM bf16"}


@functools.cache
def _cpu_features() -> Mapping[str, Any]:
    """Return the CPU's features by torch's names."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    # torch before 2.10 reports two of them, and none of ARM's.
    older = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
    found = {name: getattr(torch.cpu, function)() for name, function in older.items() if hasattr(torch.cpu, function)}
    info = Path("/proc/cpuinfo")
    if platform.machine() == "aarch64" and info.exists():
        found["bf16"] = "bf16" in info.read_text().split()
    return found


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library can; loading leaves much of it behind."""
    with contextlib.suppress(OSError, AttributeError):
        _libc().malloc_trim(0)


@functools.cache
def _libc() -> ctypes.CDLL:
    # Made once: each is garbage of a kind whose collection loses an interrupt that comes meanwhile.
    return ctypes.CDLL("libc.so.6")
