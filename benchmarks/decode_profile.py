"""Where the time of a decoded token goes: matrix products with weights, attention, everything else.

    python benchmarks/decode_profile.py [--length 7500] [--decode eager,fused] [--out FILE]

The demo model. Milliseconds per token on the CPU by torch's profiler, self time of the operations, so that
groups add up; "step" is the wall clock of the same passes without it (medians). What is in no operation is Python:
transformers' modules and kvsieve's. capture_s: seconds that compiling took, where it did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import kvsieve
from kvsieve.bench.prompts import text_ids
from kvsieve.kernels.cpu import products as kernel
from kvsieve.report.environment import environment

PLANS = {
    "full": kvsieve.plan("full"),
    "snapkv 10%": kvsieve.plan("snapkv", budget="10%", paper=True),
    "lagkv 10%": kvsieve.plan("lagkv", budget="10%"),
    "rocketkv 256": kvsieve.plan("rocketkv", budget=256),
}
PRODUCTS = "kvsieve::products"
WEIGHTS = ("aten::mm", "aten::addmm", PRODUCTS)
STEPS = 20


def group(name: str) -> str:
    if name in WEIGHTS:
        return "weights"
    return "attention" if "attention" in name or name in ("aten::bmm", "aten::_softmax") else "other operations"


def measure(model: Any, plan: kvsieve.Plan, ids: torch.Tensor, decode: str) -> dict[str, float]:
    with kvsieve.attach(model, plan, decode=decode) as sieve, torch.no_grad():
        cache, token = sieve.prefill(ids), ids[:, :1]
        spent = []
        for _ in range(3 + STEPS):
            began = time.perf_counter()
            model(token, past_key_values=cache)
            spent.append(1e3 * (time.perf_counter() - began))
        # The profiler sees operations of torch alone, and what it is told of.
        told = record_function(PRODUCTS)(kernel.multiply)
        with mock.patch.object(kernel, "multiply", told), profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(STEPS):
                model(token, past_key_values=cache)
        captured = cache.turn.record.passes.capture_s
    row = {"step": statistics.median(spent[3:]), "weights": 0.0, "attention": 0.0, "other operations": 0.0}
    for event in found.key_averages():
        row[group(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
    return {name: round(part, 2) for name, part in row.items()} | {"capture_s": round(captured, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=7500)
    parser.add_argument("--decode", default="eager,fused")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decode_profile.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load_demo()
    ids = text_ids(tokenizer)[:, : arguments.length]
    rows = {
        decode: {name: measure(model, plan, ids, decode) for name, plan in PLANS.items()}
        for decode in arguments.decode.split(",")
    }
    print(json.dumps(rows, indent=1))
    report = {"environment": environment(), "length": arguments.length, "milliseconds_per_token": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
