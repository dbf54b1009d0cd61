"""Time of prompts and per token with and without fused operations, taking turns in one process.

    python benchmarks/fused.py [MODEL] [--length 2048] [--rounds 12] [--prompts 2048,7500] [--out FILE]

With packed weights in bfloat16, with plain ones in float32: what `decode="auto"` does. Told are medians of rounds of
four tokens on the same cache, and of the ratios within a round; of three rounds for prompts, which are read in full
and, in bfloat16, sparsely.
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


@torch.no_grad()
def read(model: Any, plan: kvsieve.Plan, ids: torch.Tensor) -> dict[str, float]:
    """Seconds for a prompt, and the ratio within a round."""
    fused = FusedModules(model.get_decoder())
    spent: dict[str, list[float]] = {"plain": [], "fused": []}
    with kvsieve.attach(model, plan, decode="eager") as sieve:
        for turn in range(4):
            for name, switch in (("plain", fused.remove), ("fused", fused.install)):
                switch()
                began = time.perf_counter()
                sieve.prefill(ids)
                if turn:
                    spent[name].append(time.perf_counter() - began)
        fused.remove()
    ratios = [after / before for before, after in zip(spent["plain"], spent["fused"], strict=True)]
    medians = {f"{name}_s": round(statistics.median(each), 2) for name, each in spent.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", default="2048,7500", help="their lengths; empty for none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fused.json")
    given = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "length": given.length, "rounds": given.rounds}
    for dtype in (torch.bfloat16, torch.float32):
        model, tokenizer = kvsieve.models.load(given.model, dtype)
        text = text_ids(tokenizer)
        ids, kind = text[:, : given.length], str(dtype).removeprefix("torch.")
        for length in map(int, filter(None, given.prompts.split(","))):
            for prefill in (None, "xattention") if dtype == torch.bfloat16 else (None,):
                found = read(model, kvsieve.plan("full", prefill=prefill), text[:, :length])
                report[f"prompt of {length} tokens, {prefill or 'full'}, {kind}"] = found
                print(length, prefill, kind, found, flush=True)
        with contextlib.ExitStack() as stack:
            if dtype == torch.bfloat16:
                packed = PackedLinears(model.get_decoder(), model.get_output_embeddings())
                packed.install()
                stack.callback(packed.remove)
                packed.pack()
            for name, plan in PLANS.items():
                found = report[f"{name}, {kind}"] = measure(model, plan, ids, given.rounds)
                print(name, dtype, found, flush=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
