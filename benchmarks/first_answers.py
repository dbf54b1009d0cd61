"""How often settings that are timed (docs/performance.md), and those the demo uses, find a number in a long text.

    python benchmarks/first_answers.py [--tokens 3000] [--samples 8] [--out benchmarks/results/first_answers.json]

Speed means nothing without this. Each sample hides another seven-digit number at another depth of Python's help texts;
an answer is right when it contains the number. Greedy, the demo model; every plan reads the same prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import kvsieve
from kvsieve.cli.demo import demo_runs
from kvsieve.cli.document import QUESTION, build_document
from kvsieve.named import plan_without_floor
from kvsieve.report.environment import environment

PROFILE = "smollm2-135m-instruct"
# Every parameter that decides an answer is written out, so that these stay what was timed when defaults change.
PAPER = {"window": 8, "kernel": 7, "pooling": "max"}
PLANS = {
    "full": plan_without_floor("full"),
    "snapkv 10%": plan_without_floor("snapkv", budget="10%", window=32, kernel=7, pooling="avg"),
    "fastkv layer 14, 20%, 10%": plan_without_floor("fastkv", budget="10%", tsp_layer=14, tsp_rate=0.2, **PAPER),
    "fastkv layer 22, 30%, 10%": plan_without_floor("fastkv", budget="10%", tsp_layer=22, tsp_rate=0.3, **PAPER),
    "fastkv calibrated, 10%": plan_without_floor("fastkv", budget="10%", profile=PROFILE),
    "rocketkv 256": plan_without_floor("rocketkv", budget=256, window=32, kernel=63, pooling="max"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_answers.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load_demo()
    plans = {**PLANS, **{f"demo {run.name}": run.plan for run in demo_runs() if run.plan.roles}}
    chance = random.Random(0)
    rows: dict[str, list[dict]] = {name: [] for name in plans}
    for sample in range(arguments.samples):
        code, depth = str(chance.randrange(10**6, 10**7)), (sample + 0.5) / arguments.samples
        text = f"{build_document(tokenizer, arguments.tokens, depth, code)}\n\n{QUESTION}"
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        for name, plan in plans.items():
            with kvsieve.attach(model, plan) as sieve:
                result = sieve.generate(ids["input_ids"], max_new_tokens=28, do_sample=False)
            answer = tokenizer.decode(result.sequences[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            rows[name].append({"depth": depth, "expected": code, "right": code in answer, "answer": answer})
        print(
            f"{sample + 1} of {arguments.samples}", {name: sum(r["right"] for r in each) for name, each in rows.items()}
        )
    report = {
        "environment": environment(),
        "model": f"SmolLM2-135M-Instruct (demo model), {str(model.dtype).removeprefix('torch.')}",
        "tokens": arguments.tokens,
        "plans": {name: plan.to_dict() for name, plan in plans.items()},
        "right": {name: f"{sum(r['right'] for r in each)} of {len(each)}" for name, each in rows.items()},
        "samples": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, right in report["right"].items():
        print(f"| {name} | {right} |")


if __name__ == "__main__":
    main()
