"""Time this checkout beside another one, in turns: `python benchmarks/against.py OTHER --rounds 5 --out FILE`.

Every round starts a process for each checkout, in alternating order, which loads the demo model, reads one prompt under
each plan and generates after it. What is told are medians over rounds, and the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"budget": "10%", "paper": True},
    "adakv": {"budget": "10%", "paper": True},
    "lagkv": {"budget": "10%"},
    "fastkv": {"budget": "10%", "tsp_layer": 14, "paper": True},
    "gemfilter": {"budget": "10%", "paper": True},
    "rocketkv": {"budget": 256},
    "h2o": {"budget": "10%"},
    "tova": {"budget": "10%"},
    # There is no tokenizer to make its requests with.
    "kvzip": {"budget": "25%", "repeat_ids": (), "go_on_ids": (), "answer_ids": ()},
}
FIGURES = ("ttft_s", "tpot_s")


def measure(plans: list[str], length: int, new_tokens: int) -> dict[str, dict[str, float]]:
    """Seconds to the first token and per token after it, of each plan; the first call of each warms up."""
    import torch

    import kvsieve
    from kvsieve.named import plan_without_floor

    model, _ = kvsieve.models.load_demo()
    ids = torch.randint(100, 40_000, (1, length), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    found = {}
    for name in plans:
        with kvsieve.attach(model, plan_without_floor(name, **PLANS[name])) as sieve:
            sieve.generate(ids[:, :256], **{**options, "max_new_tokens": 4, "min_new_tokens": 4})
            stats = sieve.generate(ids, **options).stats
        found[name] = {figure: getattr(stats, figure) for figure in FIGURES}
    return found


def run(checkout: Path, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", "--length", str(given.length)]
    command += ["--new-tokens", str(given.new_tokens), "--plans", given.plans]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONWARNINGS": "ignore"}
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(told.splitlines()[-1])


def commit(checkout: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--plans", default=",".join(PLANS), help="which of them, with commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.plans.split(","), given.length, given.new_tokens)))
        return
    if given.other is None or not (given.other / "src" / "kvsieve").is_dir():
        parser.error(
            f"{given.other} is no checkout of kvsieve: give its folder, such as one made by `git worktree add`"
        )
    rounds = []
    for number in range(given.rounds):
        sides = {"this": HERE, "other": given.other}
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        rounds.append({side: run(sides[side], given) for side in order})
    rows = []
    for name in given.plans.split(","):
        for figure in FIGURES:
            mine, theirs = ([each[side][name][figure] for each in rounds] for side in ("this", "other"))
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            rows.append(
                {
                    "plan": name,
                    "figure": figure,
                    "this": round(statistics.median(mine), 5),
                    "other": round(statistics.median(theirs), 5),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(each, 3) for each in sorted(ratios)],
                }
            )
            print("{plan:10} {figure:7} {this:9.5f} {other:9.5f}  ratio {ratio:5.3f}  {ratios}".format(**rows[-1]))
    if given.out is not None:
        from kvsieve.report.environment import environment

        told = {"environment": environment(), "other": commit(given.other)}
        given.out.write_text(json.dumps({**told, "length": given.length, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
