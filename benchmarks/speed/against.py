"""Times of this tree beside another commit's: the same prompts in turns, ratios within a round, their medians.

    git worktree add ../parent HEAD~1
    python benchmarks/speed/against.py ../parent [--model MODEL] [--methods full,snapkv] [--lengths 2048,7500]

Each tree runs in a process of its own with this interpreter; the other one waits. A ratio above 1.02 exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[2]
METHODS = (
    "full,snapkv:budget=10%,fastkv:budget=10%,rocketkv:budget=10%,adakv:budget=10%,lagkv:budget=25%,full+kivi:bits=4"
)
MOST = 1.02
TIMES = ("ttft_s", "tpot_s")


def work(model_name: str | None) -> None:
    """Answer requests, one JSON object a line: {"method", "length", "new_tokens"} -> {"ttft_s", "tpot_s"}."""
    import torch

    import kvsieve

    if model_name is None:
        model, _ = kvsieve.models.load_demo()
    else:
        model, _ = kvsieve.models.load(model_name)
    generator = torch.Generator().manual_seed(0)
    for line in sys.stdin:
        request = json.loads(line)
        name, _, codec = request["method"].partition("+")
        ids = torch.randint(100, 20_000, (1, request["length"]), generator=generator).to(model.device)
        with kvsieve.attach(model, kvsieve.plan(name, codec=codec or None)) as sieve:
            options = {"max_new_tokens": request["new_tokens"], "min_new_tokens": request["new_tokens"]}
            stats = sieve.generate(ids, do_sample=False, **options).stats
        print(json.dumps({name: getattr(stats, name) for name in TIMES}), flush=True)


class Tree:
    """A tree's process, which has the model loaded."""

    def __init__(self, root: Path, model: str | None) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(root), "--work"]
        command += ["--model", model] if model else []
        path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    def run(self, **request: Any) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"error: the process of a tree ended with code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


def commit(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root of the tree to compare with")
    parser.add_argument("--model", help="checkpoint or hub id (default: the demo model)")
    parser.add_argument("--methods", default=METHODS, help="specs, a codec behind + (default: seven)")
    parser.add_argument("--lengths", default="2048,7500", help="prompt tokens (default: 2048,7500)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens of an answer (default: 48)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, the trees in turns (default: 7)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.model)
        return
    trees = {"this": Tree(HERE, given.model), "other": Tree(given.other.resolve(), given.model)}
    results: list[dict[str, Any]] = []
    for length in map(int, given.lengths.split(",")):
        for method in given.methods.split(","):
            rounds: list[dict[str, dict[str, float]]] = []
            for number in range(given.rounds + 1):
                order = list(trees) if number % 2 else list(reversed(trees))
                times = {
                    name: trees[name].run(method=method, length=length, new_tokens=given.new_tokens) for name in order
                }
                # The first round makes kernels and buffers.
                rounds += [times] if number else []
            row: dict[str, Any] = {"method": method, "length": length}
            for name in TIMES:
                row[name] = round(median(each["this"][name] for each in rounds), 4)
                row[f"{name}_ratio"] = round(median(each["this"][name] / each["other"][name] for each in rounds), 4)
            results.append(row)
            ratios = ", ".join(f"{name} {row[name]:.3f} s, {row[f'{name}_ratio']:.3f} of the other's" for name in TIMES)
            print(f"{method}, {length} tokens: {ratios}", flush=True)
    from kvsieve.report.environment import environment

    worst = max(row[f"{name}_ratio"] for row in results for name in TIMES)
    print(f"worst ratio {worst:.3f}, limit {MOST}")
    if given.out is not None:
        record = {"environment": environment(None), "other": commit(given.other), "rounds": given.rounds}
        given.out.write_text(json.dumps({**record, "model": given.model, "results": results}, indent=1) + "\n")
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()
