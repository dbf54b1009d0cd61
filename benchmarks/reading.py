"""Time per token of sparse reading beside full KV, and what it reads and holds, at several lengths.

    python benchmarks/reading.py [--lengths 2000,4000,7500] [--budget 256] [--rounds 9] [--out FILE]

One process, bf16, on the demo model; per length, the prompt is read once, every contender starts from that reading and
decodes the same number of tokens in turns, in an order that rotates (benchmarks/ragged.py). Ratios to full KV are taken
within a round; medians with their spread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import kvsieve
from kvsieve.bench import environment
from ragged import NEW_TOKENS, measure, prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="2000,4000,7500")
    parser.add_argument("--budget", default="256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reading.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load_demo(torch.bfloat16)
    names = ("snapkv", "rocketkv", "rocketkv-mt", "hsa", "quest", "sparq", "exacttopk")
    plans = {name: kvsieve.plan(name, budget=arguments.budget) for name in names}
    lengths = {}
    for length in map(int, arguments.lengths.split(",")):
        ids = prompt(tokenizer, length)
        print(f"{length} tokens")
        lengths[str(length)] = measure(model, ids, plans, "full", arguments.rounds)
    report = {
        "environment": environment(),
        "model": "SmolLM2-135M-Instruct (demo model), bf16",
        "new_tokens": NEW_TOKENS,
        "rounds": arguments.rounds,
        "plans": {name: plan.to_dict() for name, plan in plans.items()},
        "lengths": lengths,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
