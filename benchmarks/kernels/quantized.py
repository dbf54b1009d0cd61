"""Products of a few tokens with weights in GGUF's blocks, beside bfloat16 weights by kvsieve's kernel and by torch.

    python benchmarks/kernels/quantized.py [--kinds Q4_0,Q4_K] [--rows 1,5,17] [--seconds 0.5] [--out FILE]

Shapes are those of a model of 0.5B parameters: MLP and output layer. Blocks of 256 numbers take the next inner size
that they divide. Copies of a weight take turns, so that no cache holds them. Times are the least of all calls, in
microseconds; rates are gigabytes per second of the weight's own bytes; dequantizing all rows to bfloat16 is told in
nanoseconds per 1,000 numbers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.kernels.cpu import products, quantized
from kvsieve.kernels.cpu.quantized import FORMATS, QuantizedMatrix
from kvsieve.report.environment import environment, write_result

SHAPES = ((4864, 896), (896, 4864), (151936, 896))
# Copies of a weight take this many bytes, at least.
HELD_BYTES = 200_000_000


def least(calls: Sequence[Callable[[], Any]], seconds: float) -> float:
    """Return the shortest time of a call, in seconds, while calls take turns for so many seconds."""
    times = []
    end = time.perf_counter() + seconds
    for call in itertools.cycle(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
        if began > end and len(times) > len(calls):
            break
    return min(times)


def copies(weight: Tensor) -> list[Tensor]:
    return [weight, *(weight.clone() for _ in range(math.ceil(HELD_BYTES / weight.nbytes) - 1))]


def measure(kind: str, shape: tuple[int, int], rows: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure one type of blocks, or bfloat16, at one shape."""
    width, inner = shape
    found: dict[str, Any] = {"kind": kind, "width": width, "inner": inner}
    if kind == "bfloat16":
        weights = copies(torch.randn(width, inner).bfloat16())
        plain = [products.Weight(weight, None) for weight in weights]
        for count in rows:
            x = torch.randn(count, inner).bfloat16()
            ours = least([lambda x=x, w=w: products.multiply(x, w) for w in plain], seconds)  # type: ignore[misc]
            theirs = least([lambda x=x, w=w: F.linear(x, w) for w in weights], seconds)  # type: ignore[misc]
            found[f"rows_{count}"] = rates(ours, weights[0].nbytes)
            found[f"torch_{count}"] = rates(theirs, weights[0].nbytes)
        return found
    form = FORMATS[kind]
    inner = found["inner"] = -(-inner // form.size) * form.size
    # Bytes below 60 are no scale of float16 that is large or infinite.
    data = torch.randint(60, (width, inner // form.size * form.nbytes), dtype=torch.uint8)
    matrices = [QuantizedMatrix(each, kind) for each in copies(data)]
    for count in rows:
        x = torch.randn(count, inner).bfloat16()
        ours = least([lambda x=x, m=m: quantized.multiply(x, m, None) for m in matrices], seconds)  # type: ignore[misc]
        found[f"rows_{count}"] = rates(ours, data.nbytes)
    out = torch.empty(width, inner, dtype=torch.bfloat16)
    spent = least([lambda m=m: m.dequantize(out) for m in matrices], seconds)  # type: ignore[misc]
    found["dequantize_ns_per_1000"] = round(spent * 1e12 / out.numel(), 1)
    return found


def rates(seconds: float, nbytes: int) -> dict[str, float]:
    return {"us": round(seconds * 1e6, 1), "gb_per_s": round(nbytes / seconds / 1e9, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--kinds", default=",".join(["bfloat16", *FORMATS]), help="types, and bfloat16 for weights in it"
    )
    parser.add_argument("--rows", default="1,5,17", help="numbers of tokens")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per number (default 0.5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    parser.add_argument("--out", type=Path, help="file for the results (default: printed only)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = []
    for kind in given.kinds.split(","):
        for shape in SHAPES:
            row = measure(kind, shape, [int(count) for count in given.rows.split(",")], given.seconds)
            results.append(row)
            print(row, flush=True)
    if given.out:
        write_result(given.out, {"environment": environment(), "threads": given.threads, "rows": results})


if __name__ == "__main__":
    main()
