"""Choosing how attention is computed on this processor: by a table of kinds, and by measuring once per machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.attention.blocked import blocked_attention, single_query_attention
from kvsieve.attention.causal import kernel_attention, why_not_kernel
from kvsieve.attention.chunk import chunk_attention
from kvsieve.attention.request import AttentionRequest, DenseEntries, Foreseen
from kvsieve.devices import AVX512_BF16, cpu_kind
from kvsieve.folders import write_whole
from kvsieve.kernels.cpu.build import processor
from kvsieve.kernels.cpu.cores import asked_threads
from kvsieve.kernels.cpu.folder import kernel_folders
from kvsieve.types import AttentionQueries

# DenseEntries from which on a decoded token's attention is faster as two products, where those pay at all.
LONG = 1024
# Of torch's kernel and products, the table's is left only for one that takes less than this share of its time: two
# that are nearly as fast cannot be ranked on a busy machine.
_CLEARLY = 0.9
_ROUNDS = 5
# Changes with what is measured and how, so that what earlier versions have found is not used.
_FORMAT = 3
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CpuPaths:
    """Paths of attention in a dtype on this processor: by torch's fused kernel, or as two matrix products.

    Attributes:
        prompt_products: True where many new tokens are read by products.
        token_products_from: stored entries from which on a single token is read by products; None for never.
        source: "table", "measured", or "measured before" where a file of the user's cache had it.
        prompt_ratio: time of products over that of torch's kernel for a prompt, None where it was not measured.
        token_ratio: the same for single tokens.
    """

    prompt_products: bool
    token_products_from: int | None
    source: str = "table"
    prompt_ratio: float | None = None
    token_ratio: float | None = None

    def __str__(self) -> str:
        prompt = "products" if self.prompt_products else "torch's kernel"
        token = "torch's kernel"
        if self.token_products_from is not None:
            token = f"products from {self.token_products_from} entries on"
        kernels = f"prompts by {prompt}, tokens by {token}"
        if self.prompt_ratio is None or self.token_ratio is None:
            return f"{kernels} ({self.source})"
        ratios = f"{self.prompt_ratio:.2f} and {self.token_ratio:.2f}"
        return f"{kernels} ({self.source}: products take {ratios} of torch's kernel's time)"


def faster_here(query: Tensor) -> bool:
    """Return whether two matrix products are faster than torch's fused CPU kernel for many queries such as these.

    In bfloat16 they are the C kernel's where there is one for the processor (`attention.causal`). Torch's round logits
    to bfloat16, as transformers' eager attention does; the model's output is as near to float32 as with the fused
    kernel.
    """
    return _asked(query) and cpu_paths(query.dtype).prompt_products


def faster_for_token(query: Tensor, length: int) -> bool:
    """Return the same for a single query over `length` stored entries."""
    if length < LONG or not _asked(query):
        return False
    least = cpu_paths(query.dtype).token_products_from
    return least is not None and length >= least


def foresee(keys: Tensor | None) -> Foreseen:
    """Return the facts of this machine that attention of one token depends on; keys: [..., N, D], or None."""
    return Foreseen(asked_threads(), keys is not None and faster_for_token(keys, keys.shape[-2]))


def _asked(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.dtype in _FLOATS


def cpu_paths(dtype: torch.dtype) -> CpuPaths:
    """Return the paths for a dtype, measuring them first where that has not been done: half a second, once per machine.

    Measurements are stored beside the compiled kernels (`kernels.cpu.folder`), by processor, version of torch, threads
    and dtype. ``KVSIEVE_ATTENTION=table`` measures nothing and goes by the kind of processor alone.
    """
    return _paths(dtype, asked_threads())


@functools.cache
def _paths(dtype: torch.dtype, threads: int) -> CpuPaths:
    known = table(cpu_kind(), dtype)
    if os.environ.get("KVSIEVE_ATTENTION") == "table":
        return known
    facts = {
        "format": _FORMAT,
        "processor": processor(),
        "kind": cpu_kind(),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": str(dtype),
        "products_in": os.environ.get("MKL_ENABLE_INSTRUCTIONS"),
    }
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    paths = [folder / f"attention-{digest}.json" for folder in kernel_folders().usable]
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return CpuPaths(**json.loads(path.read_text())["paths"], source="measured before")
    chosen = decide(known, measured(dtype))
    values = {name: value for name, value in asdict(chosen).items() if name != "source"}
    for path in paths:
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({"facts": facts, "paths": values}, indent=1) + "\n")
            break
    return chosen


def table(kind: str, dtype: torch.dtype) -> CpuPaths:
    """Return the known paths of a kind of processor: products where the fused kernel lacks its bfloat16 instructions.

    Measured on AVX-512 BF16, and in float32 with AVX-512 and AVX2 (benchmarks/speed/cpu_kinds.py). AMX and ARM have not
    been measured, and start from torch's own kernel.
    """
    products = kind == AVX512_BF16 and dtype == torch.bfloat16
    return CpuPaths(products, LONG if products else None)


def decide(known: CpuPaths, ratios: dict[str, list[float]]) -> CpuPaths:
    """Leave the table's path for one that is clearly faster in every round: a busy machine disturbs some.

    Args:
        known: of the table.
        ratios: time of products over that of torch's kernel in each round, by "prompt" and "token".
    """
    prompt = _better(known.prompt_products, ratios["prompt"])
    token = _better(known.token_products_from is not None, ratios["token"])
    ratio = {name: round(statistics.median(rounds), 3) for name, rounds in ratios.items()}
    return CpuPaths(prompt, LONG if token else None, "measured", ratio["prompt"], ratio["token"])


def _better(products: bool, ratios: list[float]) -> bool:
    return min(ratios) < 1 / _CLEARLY if products else max(ratios) < _CLEARLY


@torch.no_grad()
def measured(dtype: torch.dtype) -> dict[str, list[float]]:
    """Measure products over torch's kernel: 256 tokens after 1,280, and a token over keys that no cache holds."""
    heads = 3
    groups = 3
    dim = 64
    scale = dim**-0.5
    source = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, generator=source).to(dtype)

    query = some(1, heads * groups, 256, dim)
    token = AttentionQueries(some(1, heads, groups, dim), scale)
    stored = some(1, heads, 4096, dim)
    entries = DenseEntries(stored[:, :, :1536], stored[:, :, 1536:3072])
    prompt: AttentionRequest[DenseEntries, None] = AttentionRequest(AttentionQueries(query, scale), entries)
    products = kernel_attention if why_not_kernel(prompt) is None else blocked_attention
    layers = [(stored.clone(), stored.clone()) for _ in range(12)]
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "prompt": (
            lambda: products(prompt),
            lambda: chunk_attention(prompt),
        ),
        "token": (
            lambda: [single_query_attention(token, k, v, None) for k, v in layers],
            lambda: [F.scaled_dot_product_attention(token.query, k, v, scale=scale) for k, v in layers],
        ),
    }
    return {name: _ratios(*pair) for name, pair in pairs.items()}


def _ratios(products: Callable[[], object], fused: Callable[[], object]) -> list[float]:
    """Ratio of each round, after one that does not count."""
    found = []
    for _ in range(_ROUNDS + 1):
        spent = []
        for run in (products, fused):
            began = time.perf_counter()
            run()
            spent.append(time.perf_counter() - began)
        found.append(spent[0] / spent[1])
    return found[1:]
