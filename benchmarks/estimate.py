"""What `kvsieve estimate` predicts for the demo model beside what `kvsieve bench` measured.

    python benchmarks/estimate.py [--measured FILE] [--out FILE]

Measured ratios are medians over kvsieve's own full KV, so that both sides run through the same code. Prints the table
of docs/estimate.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kvsieve import Plan
from kvsieve.bench.estimate import Estimate, check_priced, estimate
from kvsieve.bench.geometry import Geometry, geometry
from kvsieve.cli.estimate import model_config
from kvsieve.errors import PlanError
from kvsieve.report.environment import environment
from kvsieve.report.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
QUANTITIES = {"ttft": "ttft_s", "tpot": "tpot_s", "kv": "kv_bytes"}


def predicted(one: Estimate, full: Estimate) -> dict[str, float]:
    return {
        "ttft": one.prefill_flops / full.prefill_flops,
        "tpot": one.decode_bytes / full.decode_bytes,
        "kv": one.kv_bytes / full.kv_bytes,
    }


def fitted_rates(model: Geometry, report: dict[str, Any]) -> tuple[float, float]:
    """TFLOP/s of linear layers and of attention that explain full KV's times best (relative least squares)."""
    work, times = [], []
    for length, entry in report["lengths"].items():
        full = estimate(model, Plan(), int(length))
        times.append(entry["summary"]["full"]["ttft_s"]["median"])
        work.append([full.matmul_flops / 1e12 / times[-1], full.attention_flops / 1e12 / times[-1]])
    matrix = torch.tensor(work, dtype=torch.float64)
    costs = torch.linalg.lstsq(matrix, torch.ones(len(times), 1, dtype=torch.float64)).solution
    return 1 / costs[0].item(), 1 / costs[1].item()


def compare(model: Geometry, report: dict[str, Any], rates: tuple[float, float]) -> list[dict[str, Any]]:
    """One row per length and plan that was measured and can be priced."""
    rows = []
    for length in sorted(report["lengths"], key=int):
        summary = report["lengths"][length]["summary"]
        full = estimate(model, Plan(), int(length))
        for name, description in report["plans"].items():
            plan = Plan.from_dict(description)
            if not plan.roles or not _priced(plan):
                continue
            one = estimate(model, plan, int(length))
            at_rates = one.prefill_seconds(*rates) / full.prefill_seconds(*rates)
            row: dict[str, Any] = {"tokens": int(length), "plan": name, "ttft_ratio_at_rates": round(at_rates, 4)}
            for quantity, ratio in predicted(one, full).items():
                key = QUANTITIES[quantity]
                measured = summary[name][key]["median"] / summary["full"][key]["median"]
                row[f"{quantity}_ratio_predicted"] = round(ratio, 4)
                row[f"{quantity}_ratio_measured"] = round(measured, 4)
            rows.append(row)
    return rows


def _priced(plan: Plan) -> bool:
    try:
        check_priced(plan)
    except PlanError:
        return False
    return True


def table(rows: list[dict[str, Any]]) -> str:
    headers = ["tokens", "plan", "TTFT at fitted rates"]
    for quantity in QUANTITIES:
        headers += [f"{quantity.upper()} predicted", "measured"]
    cells = [
        [str(row["tokens"]), row["plan"], f"{row['ttft_ratio_at_rates']:.3f}"]
        + [f"{row[f'{quantity}_ratio_{side}']:.3f}" for quantity in QUANTITIES for side in ("predicted", "measured")]
        for row in rows
    ]
    return markdown_table(headers, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measured", type=Path, default=RESULTS / "bench" / "bench.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "estimate.json")
    arguments = parser.parse_args()
    report = json.loads(arguments.measured.read_text())
    model = geometry(model_config(None))
    rates = fitted_rates(model, report)
    rows = compare(model, report, rates)
    result = {
        "environment": environment(),
        "measured_in": arguments.measured.name,
        "measured_environment": report["environment"],
        "model": report["model"],
        "fitted_matmul_tflops": round(rates[0], 4),
        "fitted_attention_tflops": round(rates[1], 4),
        "ratios": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    print(f"\nfitted on full KV: linear layers {rates[0]:.3f}, attention {rates[1]:.3f} TFLOP/s")


if __name__ == "__main__":
    main()
