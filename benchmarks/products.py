"""Products of few tokens with weights, by kvsieve's C kernel, by torch and with packed weights, on each kind of CPU.

    python -m benchmarks.products [--kinds avx2,avx512,native] [--rows 1,2,4,8,16,32,64] [--rounds 9] [--out FILE]

The widths are those of SmolLM2-135M's and Qwen2.5-0.5B's layers, with as many random weights of each as no cache holds.
Each kind is a process of its own, held to it as benchmarks/cpu_kinds.py does. All ways take turns; told is the least
time of the rounds for one product, in microseconds of the processor, of all threads together, which other work on the
machine disturbs less than the clock; and that of the kernel over the others. Packed weights are there in bfloat16 where
oneDNN has a form for them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cpu_kinds import COMPILED, HELD, held_to
from kvsieve.devices import cpu_kind
from kvsieve.kernels.cpu import products as kernel
from kvsieve.report.environment import environment

WIDTHS = {
    "SmolLM2 queries, keys and values": (960, 576),
    "SmolLM2 gate and up": (3072, 576),
    "SmolLM2 down": (576, 1536),
    "SmolLM2 output": (49152, 576),
    "Qwen queries, keys and values": (1152, 896),
    "Qwen gate and up": (9728, 896),
    "Qwen down": (896, 4864),
    "Qwen output": (151936, 896),
}
# Bytes of weights that are multiplied with in turn.
TIMED = 128 << 20


def ways_of(weights: list[Tensor]) -> dict[str, list[Callable[[Tensor], Any]]]:
    """Every way of multiplying, for each of the weights."""
    told = [kernel.Weight(weight, None) for weight in weights]
    ways: dict[str, list[Callable[[Tensor], Any]]] = {
        "kernel": [lambda x, each=each: kernel.multiply(x, each) for each in told],
        "torch": [lambda x, each=each: F.linear(x, each) for each in weights],
    }
    if weights[0].dtype == torch.bfloat16:
        try:
            packed = [torch.ops.mkldnn._reorder_linear_weight(each, 1) for each in weights]
        except RuntimeError:
            return ways
        multiply = torch.ops.mkldnn._linear_pointwise.default
        ways["packed"] = [lambda x, each=each: multiply(x, each, None, "none", [], "") for each in packed]
    return ways


def times(weights: list[Tensor], rows: int, rounds: int) -> dict[str, float]:
    """Microseconds of one product in each way, and ratios of the kernel to the others."""
    x, ways = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype), ways_of(weights)
    least = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 1):
        for name, products in ways.items():
            began = time.process_time()
            for product in products:
                product(x)
            if turn:
                least[name] = min(least[name], 1e6 * (time.process_time() - began) / len(products))
    ratios = {f"kernel to {name}": round(least["kernel"] / each, 3) for name, each in least.items() if name != "kernel"}
    return {name: round(each, 1) for name, each in least.items()} | ratios


@torch.no_grad()
def measure(rows: list[int], rounds: int) -> dict[str, Any]:
    """Measure in this process, on the kind of CPU that it is held to."""
    found: dict[str, Any] = {"kind": cpu_kind(), "threads": torch.get_num_threads(), "kernel": kernel.built().told}
    for dtype in (torch.bfloat16, torch.float32):
        for name, (width, dim) in WIDTHS.items():
            count = max(1, TIMED // (width * dim * dtype.itemsize))
            weights = [torch.randn(width, dim).to(dtype) for _ in range(count)]
            kind = str(dtype).removeprefix("torch.")
            found.setdefault(kind, {})[name] = {each: times(weights, each, rounds) for each in rows}
            print(found["kind"], kind, name, found[kind][name], file=sys.stderr, flush=True)
    return found


def in_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run this script in a process that is held to a kind."""
    command = [sys.executable, "-m", "benchmarks.products", "--alone", "--rows", given.rows]
    command += ["--rounds", str(given.rounds)]
    done = subprocess.run(command, env=held_to(name), stdout=subprocess.PIPE, text=True, check=True)
    return {"held_to": HELD[name], "compiled": COMPILED[name], **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default="avx2,avx512,native", help=f"of {', '.join(HELD)}")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="measure in this process and print")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "products.json")
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(measure([int(each) for each in given.rows.split(",")], given.rounds)))
        return
    # Kinds that were measured by an earlier call stay.
    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.kinds.split(","):
        row = in_process(name, given)
        report[row["kind"]] = {"environment": environment(), **row}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
