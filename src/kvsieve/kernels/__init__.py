"""Triton kernels that replace many passes over memory on GPUs; each has a counterpart in plain torch.

Importing this package imports neither torch nor triton: torch comes with the first call, triton with the first kernel.
Callers check `usable` and otherwise use torch. Kernels take `dtypes`, accumulate in float32 and are safe under CUDA
graphs: they never wait for the device, allocate by static sizes only, and may read growing lengths from the device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

from kvsieve.lazy import Tensor, torch

# Most new tokens whose attention is split along the entries, as that of a single one is.
FEW_TOKENS = 32
# Most pages of a KV row that the single program of `page_entries` can process.
MOST_PAGES = 16384

# Public functions by the module that defines them.
_FUNCTIONS = {
    "block_attention": "blocks",
    "decode_attention": "decode",
    "exact_decode": "packed",
    "kv_row_attention": "decode",
    "largest_channels": "choice",
    "packed_decode": "packed",
    "ragged_decode": "decode",
    "page_bounds": "pages",
    "page_entries": "choice",
    "page_scores": "pages",
    "choice_fits": "paged",
    "paged_choice": "paged",
    "paged_scores": "paged",
    "update_pages": "pages",
    "pooled": "window",
    "window_mass": "window",
}
# Set in tests, which run kernels under Triton's interpreter.
_interpreted = False


@functools.cache
def dtypes() -> tuple[torch.dtype, ...]:
    return torch.bfloat16, torch.float16, torch.float32


def why_not(*tensors: Tensor) -> str | None:
    """Return the reason why kernels do not run on these tensors; None on a GPU that `reason` accepts, in `dtypes`."""
    if not (_interpreted or tensors[0].is_cuda):
        return "it is for GPUs"
    if any(tensor.dtype not in dtypes() for tensor in tensors):
        return "it takes bfloat16, float16 and float32"
    if _interpreted:
        return None
    return reason(tensors[0].device) if all(tensor.is_cuda for tensor in tensors) else "some tensors are not on the GPU"


def usable(*tensors: Tensor) -> bool:
    """Return whether kernels run on these tensors; see `why_not`."""
    return why_not(*tensors) is None


@functools.cache
def reason(device: torch.device) -> str | None:
    """Return why kernels do not run on `device`, or None if they do. KVSIEVE_KERNELS is read once."""
    if device.type != "cuda":
        return f"kernels run on CUDA devices, not on {device.type}"
    if os.environ.get("KVSIEVE_KERNELS") == "0":
        return "switched off: KVSIEVE_KERNELS=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if torch.version.hip is not None:
        return "kernels are tested on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, kernels need 8.0"
    return None


def __getattr__(name: str) -> Any:
    """Import a kernel's function, and triton with it, on first access."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    return found
