"""Time to first token, time per token and KV bytes of the first methods against plain transformers.

    python benchmarks/first.py [--lengths 2048,4096,7500] [--rounds 5] [--out benchmarks/results/first.json]
    python benchmarks/first.py --show benchmarks/results/first.json      # the README's table from saved numbers

Everything runs in one process, bf16, on the demo model. In each round every contender reads the same prompt once, in
an order that rotates, so that a machine whose speed drifts treats all alike. Ratios are taken within a round, against
transformers' own loop (DynamicCache, sdpa, the next token by argmax); medians are reported with their spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import kvsieve
from kvsieve.bench import environment
from kvsieve.hf.memory import measure_peak

PLANS = {
    "full": kvsieve.plan("full"),
    "snapkv 10%": kvsieve.plan("snapkv", budget="10%"),
    "fastkv layer 14, 20%, 10%": kvsieve.plan("fastkv", budget="10%", tsp_layer=14, tsp_rate=0.2),
    "fastkv layer 22, 30%, 10%": kvsieve.plan("fastkv", budget="10%", tsp_layer=22, tsp_rate=0.3),
}
BASELINE = "transformers"
NEW_TOKENS = 32


def run_transformers(model, ids: torch.Tensor) -> dict[str, float]:
    with measure_peak(model.device) as peak, torch.no_grad():
        began = time.perf_counter()
        cache = DynamicCache(config=model.config)
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(NEW_TOKENS - 1):
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        ended = time.perf_counter()
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {
        "ttft_s": first - began,
        "tpot_s": (ended - first) / (NEW_TOKENS - 1),
        "kv_bytes": held,
        "peak_bytes": peak.bytes,
    }


def run_sieve(model, plan: kvsieve.Plan, ids: torch.Tensor) -> dict[str, float]:
    with kvsieve.attach(model, plan) as sieve:
        stats = sieve.generate(
            ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        ).stats
    if not stats.applied:
        raise RuntimeError(f"{plan.name} did not run: {stats.notes}")
    return {name: getattr(stats, name) for name in ("ttft_s", "tpot_s", "kv_bytes", "peak_bytes")}


def measure(model, ids: torch.Tensor, rounds: int, console: Console) -> dict[str, list[dict[str, float]]]:
    names = [BASELINE, *PLANS]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            sample = run_transformers(model, ids) if name == BASELINE else run_sieve(model, PLANS[name], ids)
            samples[name].append(sample)
        console.print(f"{ids.shape[1]} tokens: round {turn + 1} of {rounds}", style="dim")
    return samples


def summarise(samples: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians, and medians of the per-round ratios to the baseline with their smallest and largest."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name, runs in samples.items():
        out[name] = {}
        for key in ("ttft_s", "tpot_s", "kv_bytes", "peak_bytes"):
            if any(run[key] is None for run in [*runs, *samples[BASELINE]]):
                continue
            ratios = [run[key] / base[key] for run, base in zip(runs, samples[BASELINE], strict=True)]
            out[name][key] = {
                "median": statistics.median(run[key] for run in runs),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_min": round(min(ratios), 4),
                "ratio_max": round(max(ratios), 4),
            }
    return out


def show(length: int, summary: dict[str, dict[str, dict[str, float]]], console: Console) -> None:
    table = Table(title=f"{length} tokens (ratios to transformers)")
    for heading in ("", "TTFT s", "ratio", "TPOT ms", "ratio", "KV MiB", "ratio", "peak MiB"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, row in summary.items():
        table.add_row(
            name,
            f"{row['ttft_s']['median']:.2f}",
            f"{row['ttft_s']['ratio']:.2f}",
            f"{1e3 * row['tpot_s']['median']:.1f}",
            f"{row['tpot_s']['ratio']:.2f}",
            f"{row['kv_bytes']['median'] / 2**20:.1f}",
            f"{row['kv_bytes']['ratio']:.3f}",
            f"{row['peak_bytes']['median'] / 2**20:.0f}" if "peak_bytes" in row else "?",
        )
    console.print(table)


def markdown(report: dict) -> str:
    """The README's table: medians, and in brackets the ratio to transformers."""
    lines = [
        "| prompt | | time to first token | time per token | KV held | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for length, entry in report["lengths"].items():
        for name, row in entry["summary"].items():
            cells = [
                f"{row['ttft_s']['median']:.2f} s ({row['ttft_s']['ratio']:.2f})",
                f"{1e3 * row['tpot_s']['median']:.1f} ms ({row['tpot_s']['ratio']:.2f})",
                f"{row['kv_bytes']['median'] / 2**20:.1f} MiB ({row['kv_bytes']['ratio']:.3f})",
                f"{row['peak_bytes']['median'] / 2**20:.0f} MiB" if "peak_bytes" in row else "not known",
            ]
            lines.append(f"| {length} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="2048,4096,7500")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first.json")
    parser.add_argument("--show", type=Path, help="print a saved result as Markdown and measure nothing")
    arguments = parser.parse_args()
    if arguments.show:
        print(markdown(json.loads(arguments.show.read_text())))
        return
    console = Console()
    model, tokenizer = kvsieve.models.load_demo(torch.bfloat16)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    measure(model, ids[:, :256], 1, Console(quiet=True))
    report = {
        "environment": environment(),
        "model": "SmolLM2-135M-Instruct (demo model), bf16",
        "new_tokens": NEW_TOKENS,
        "plans": {name: plan.to_dict() for name, plan in PLANS.items()},
        "lengths": {},
    }
    for length in (int(part) for part in arguments.lengths.split(",")):
        samples = measure(model, ids[:, :length], arguments.rounds, console)
        summary = summarise(samples)
        report["lengths"][str(length)] = {"summary": summary, "samples": samples}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        show(length, summary, console)


if __name__ == "__main__":
    main()
