"""Time per token with and without fused operations, taking turns in one process on the same cache.

    python benchmarks/fused.py [MODEL] [--length 2048] [--rounds 12] [--out FILE]

With packed weights in bfloat16, with plain ones in float32: what `decode="auto"` does. Told are medians of rounds of
four tokens, and of the ratios within a round.
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
def measure(model: Any, plan: kvsieve.Plan, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    fused = FusedModules(model.get_decoder())
    spent: dict[str, list[float]] = {"plain": [], "fused": []}
    with kvsieve.attach(model, plan, decode="eager") as sieve:
        cache, token = sieve.prefill(ids), ids[:, :1]
        for turn in range(rounds + 1):
            for name, switch in (("plain", fused.remove), ("fused", fused.install)):
                switch()
                model(token, past_key_values=cache)
                began = time.perf_counter()
                for _ in range(TOKENS):
                    model(token, past_key_values=cache)
                if turn:
                    spent[name].append(1e3 * (time.perf_counter() - began) / TOKENS)
        fused.remove()
    ratios = [after / before for before, after in zip(spent["plain"], spent["fused"], strict=True)]
    medians = {f"{name}_ms": round(statistics.median(each), 2) for name, each in spent.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3), "modules": fused.count}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fused.json")
    given = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "length": given.length, "rounds": given.rounds}
    for dtype in (torch.bfloat16, torch.float32):
        model, tokenizer = kvsieve.models.load(given.model, dtype)
        ids = text_ids(tokenizer)[:, : given.length]
        with contextlib.ExitStack() as stack:
            if dtype == torch.bfloat16:
                packed = PackedLinears(model.get_decoder(), model.get_output_embeddings())
                packed.install()
                stack.callback(packed.remove)
                packed.pack()
            for name, plan in PLANS.items():
                found = report[f"{name}, {str(dtype).removeprefix('torch.')}"] = measure(model, plan, ids, given.rounds)
                print(name, dtype, found, flush=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
