"""How often the interval that `kvsieve advise` states holds: its choice, replayed on losses that were measured before.

    python benchmarks/answers/advise_replay.py [--samples 2,4,8] [--replays 2000] [--out FILE]

`advise_trials.py` asks for advice a few times, for hours. Here a trial draws, without replacement, samples of each task
from a committed evaluation, in three parts: the plan of least loss on the first is chosen among those of one budget,
the loss over the second is stated with its interval, as `advise` does, and the loss over the third is looked up. Told
are the share of trials whose loss lies within, below and above, and medians of the interval's ends over the stated
loss.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve.lab.advise.intervals import FLOOR, prediction_interval
from kvsieve.lab.eval.results import load
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

RESULTS = Path(__file__).parents[1] / "results"
NEEDLES = ("needle", "ruler_niah_single_2", "ruler_niah_multikey_1")
# Evaluations of each model, and their tasks that are like those of an advice, or a public one.
RUNS = {
    "Qwen2.5-Coder-0.5B, 8,192 tokens": (
        "qwen2.5-coder-0.5b/ruler",
        (*NEEDLES, "ruler_niah_single_3", "ruler_niah_multikey_2"),
    ),
    "Qwen2.5-Coder-0.5B, scientific QA": ("qwen2.5-coder-0.5b/leval", ("leval_scientific_qa",)),
}
Losses = dict[str, dict[str, np.ndarray[Any, Any]]]


def losses_of(folder: str, tasks: tuple[str, ...]) -> dict[str, Losses]:
    """Losses by budget, plan and task, in the order of samples, the question visible."""
    found: dict[str, dict[str, dict[str, dict[int, float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for row in load(RESULTS / folder).samples:
        if row["task"] in tasks and row["question"] == "visible" and row["budget"] is not None:
            found[row["budget"]][row["label"]][row["task"]][row["sample"]] = row["kl"]
    return {
        budget: {
            plan: {task: np.array([each for _, each in sorted(mine[task].items())]) for task in tasks}
            for plan, mine in plans.items()
        }
        for budget, plans in found.items()
    }


def trials(budgets: dict[str, Losses], samples: int, count: int) -> Iterator[tuple[float, float, float, float]]:
    """Stated loss, the interval's ends, and the loss on other samples."""
    random = np.random.default_rng(0)
    for at in range(count):
        plans = budgets[sorted(budgets)[at % len(budgets)]]
        sizes = {task: len(each) for task, each in next(iter(plans.values())).items()}
        drawn = {task: random.permutation(size)[: 3 * samples].reshape(3, samples) for task, size in sizes.items()}
        parts = {plan: {task: mine[task][drawn[task]] for task in mine} for plan, mine in plans.items()}
        chosen = min(parts.values(), key=lambda mine: np.mean([each[0].mean() for each in mine.values()]))
        held = [each[1].tolist() for each in chosen.values()]
        known = [each[:2].ravel().tolist() for each in chosen.values()]
        yield (*prediction_interval(held, known), float(np.mean([each[2].mean() for each in chosen.values()])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", default="2,4,8", help="of each task and part")
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS / "advise_replay.json")
    given = parser.parse_args()
    rows = []
    for name, (folder, tasks) in RUNS.items():
        budgets = losses_of(folder, tasks)
        least = min(len(each) for plans in budgets.values() for mine in plans.values() for each in mine.values())
        for samples in map(int, given.samples.split(",")):
            if 3 * samples > least:
                continue
            stated, low, high, fresh = np.array(list(trials(budgets, samples, given.replays))).T
            row = {
                "within": np.mean((low <= fresh) & (fresh <= high)),
                "below": np.mean(fresh < low),
                "above": np.mean(fresh > high),
                "low": np.median(low / np.maximum(stated, FLOOR)),
                "high": np.median(high / np.maximum(stated, FLOOR)),
            }
            rows.append(
                {"run": name, "tasks": len(tasks), "samples": samples} | {k: round(float(v), 3) for k, v in row.items()}
            )
    write_result(given.out, {"environment": environment(), "replays": given.replays, "rows": rows})
    print(markdown_table(list(rows[0]), [[str(each) for each in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
