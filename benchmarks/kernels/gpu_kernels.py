"""The GPU kernels: right or wrong, and how near they come to the rate of a copy.

    python benchmarks/kernels/gpu_kernels.py [--out benchmarks/results/gpu_kernels.json]
    python benchmarks/kernels/gpu_kernels.py --check

Every kernel is first compared with its twin in float64, on odd sizes; --check does that alone, on a machine without a
GPU under Triton's interpreter. Then Llama-3.1-8B's layer at 8K to 128K tokens: aims are 70% of the copy's rate for page
scores and chosen entries, 3% of a layer's prefill for window masses, and for chosen blocks of a prompt 1.3 times their
part of the blocks of what torch's attention over all takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from kvsieve import kernels
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

ROOT = Path(__file__).parents[2]


def table(report: dict[str, Any]) -> str:
    """Markdown of what was measured."""
    rows = []
    for row in report["rows"]:
        cells = [
            row["kernel"],
            row["shape"],
            f"{row['ms']:.4f}",
            f"{row['plain_ms']:.4f}",
            f"{row['share_of_copy']:.0%}",
        ]
        shares = (f"{row[name]:.1%}" if name in row else "" for name in ("share_of_layer", "share_of_full"))
        rows.append([*cells, *shares])
    names = ("kernel", "shape", "ms", "plain torch, ms", "of a copy's rate", "of its layer's prefill")
    return markdown_table([*names, "of full attention"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with plain torch only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_kernels.json")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    why = kernels.reason(device)
    if arguments.check and not gpu:
        why = None if importlib.util.find_spec("triton") else "triton is not installed: pip install triton"
    if why is not None:
        sys.exit(f"nothing measured: {why}; --check needs no GPU")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    # Both import triton.
    from benchmarks.kernels.measure import check, measure
    from interpreted import interpreted

    torch.manual_seed(0)
    with nullcontext() if gpu else interpreted():
        checks = check(device)
    for row in checks:
        print(f"{'ok   ' if row['passes'] else 'WRONG'} {row['kernel']}, {row['dtype']}, error {row['error']:.1e}")
    if not all(row["passes"] for row in checks):
        sys.exit("kernels differ from plain torch: nothing measured")
    if arguments.check:
        return
    report = {"environment": environment(), "checks": checks, **measure(device)}
    write_result(arguments.out, report)
    print(f"\na copy moves {report['copy_gb_per_s']:.0f} GB/s\n\n{table(report)}")


if __name__ == "__main__":
    main()
