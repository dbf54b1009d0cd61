"""Time per token where linear layers that read the same input are one product, beside a product for each.

    python benchmarks/joint_products.py [MODEL] [--length 2048] [--rounds 16] [--out FILE]

With packed weights and fused operations in bfloat16, taking turns in one process on the same cache. Told are medians of
rounds of four tokens, and of the ratios within a round, of the clock and of the processor's time, which is the steadier
one on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.bench.prompts import text_ids
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.hf.decode.packed_weights import PackedLinears
from kvsieve.report.environment import environment

PLANS = {"full": kvsieve.plan("full"), "snapkv 10%": kvsieve.plan("snapkv", budget="10%", paper=True)}
TOKENS = 4


@torch.no_grad()
def measure(
    model: Any, plan: kvsieve.Plan, ids: torch.Tensor, rounds: int, ways: dict[str, PackedLinears]
) -> dict[str, float]:
    """Milliseconds of each of two ways, and ratios of the second to the first."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with kvsieve.attach(model, plan, decode="eager") as sieve:
        cache, token = sieve.prefill(ids), ids[:, :1]
        for turn in range(rounds + 1):
            for name, packed in ways.items():
                # One's forwards take the place of the other's.
                packed.install()
                model(token, past_key_values=cache)
                began = time.perf_counter(), time.process_time()
                for _ in range(TOKENS):
                    model(token, past_key_values=cache)
                if turn:
                    spent[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    found = {
        f"{name}_ms": round(1e3 * statistics.median(each[0] for each in times) / TOKENS, 2)
        for name, times in spent.items()
    }
    for at, name in enumerate(("ratio", "processor_ratio")):
        ratios = [second[at] / first[at] for first, second in zip(*spent.values(), strict=True)]
        found[name] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "joint_products.json")
    given = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "length": given.length, "rounds": given.rounds}
    model, tokenizer = kvsieve.models.load(given.model, torch.bfloat16)
    decoder, ids = model.get_decoder(), text_ids(tokenizer)[:, : given.length]
    fused, output = FusedModules(decoder), model.get_output_embeddings()
    ways = {name: PackedLinears(decoder, output, joint=name == "joint") for name in ("separate", "joint")}
    with contextlib.ExitStack() as stack:
        fused.install()
        stack.callback(fused.remove)
        for packed in ways.values():
            stack.callback(packed.remove)
            packed.pack()
        for name, plan in PLANS.items():
            report[name] = measure(model, plan, ids, given.rounds, ways)
            print(name, report[name], flush=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
