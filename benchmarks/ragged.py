"""Time per token with ragged heads beside uniform ones of the same total: Ada-KV and DuoAttention against SnapKV.

    python benchmarks/ragged.py [--length 7500] [--budget 10%] [--rounds 15] [--out benchmarks/results/ragged.json]

One process, bf16, on the demo model. The prompt is read once; every contender starts from that reading, evicts, and
decodes the same tokens in turns, in an order that rotates, through the same forward pass. Ratios are taken within a
round; medians with their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch

import kvsieve
from kvsieve.bench import environment
from kvsieve.hf.attach import attach
from kvsieve.hf.shared import next_logits, read_shared

NEW_TOKENS = 32


def decode(model, plan: kvsieve.Plan, cache, ids: torch.Tensor) -> float:
    """Seconds per token for NEW_TOKENS tokens after the prompt `ids`, which is in the cache, under a plan's reader."""
    with attach(model, kvsieve.Plan(read=plan.read, name=plan.name)), torch.no_grad():
        token = next_logits(model, cache, torch.cat([ids, ids[:, :1]], 1))[:, -1].argmax(-1, keepdim=True)
        began = time.perf_counter()
        for _ in range(NEW_TOKENS):
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - began) / NEW_TOKENS


def measure(model, ids: torch.Tensor, plans: dict[str, kvsieve.Plan], baseline: str, rounds: int) -> dict[str, dict]:
    """A row per plan and full KV: time per token and its ratio to the baseline's of the same round, bytes, entries."""
    plans = {"full": kvsieve.plan("full"), **plans}
    shared = read_shared(model, None, ids, window=max(plan.window for plan in plans.values()), new_tokens=NEW_TOKENS)
    caches = {name: shared.reduced(plan.evict) for name, plan in plans.items()}
    held = {name: cache.nbytes() for name, cache in caches.items()}
    entries = {name: sum(cache.entries()) for name, cache in caches.items()}
    del shared
    names = list(caches)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = decode(model, plans[name], caches[name].fork(), ids)
            if turn:
                seconds[name].append(spent)
    rows = {}
    for name, runs in seconds.items():
        ratios = [mine / base for mine, base in zip(runs, seconds[baseline], strict=True)]
        rows[name] = {
            "tpot_ms": round(1e3 * statistics.median(runs), 2),
            f"to_{baseline}": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
            "kv_bytes": held[name],
            "entries_per_head": round(entries[name] / len(caches[name].layers), 1),
        }
        print(name, rows[name])
    return rows


def prompt(tokenizer, length: int) -> torch.Tensor:
    """int64 [1, length]: the beginning of Python's own documentation."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :length]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=7500)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ragged.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load_demo(torch.bfloat16)
    ids = prompt(tokenizer, arguments.length)
    plans = {
        "snapkv": kvsieve.plan("snapkv", budget=arguments.budget),
        "adakv": kvsieve.plan("adakv", budget=arguments.budget),
        "duoattention": kvsieve.plan("duoattention", budget=arguments.budget, profile="smollm2-135m-instruct"),
    }
    report = {
        "environment": environment(),
        "model": "SmolLM2-135M-Instruct (demo model), bf16",
        "length": ids.shape[1],
        "new_tokens": NEW_TOKENS,
        "rounds": arguments.rounds,
        "plans": {name: plan.to_dict() for name, plan in plans.items()},
        "rows": measure(model, ids, plans, "snapkv", arguments.rounds),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
