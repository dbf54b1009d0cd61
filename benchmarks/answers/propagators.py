"""Propagators side by side: what they answer, and their time to the first token beside full KV's.

    python benchmarks/answers/propagators.py [MODEL] [--length 2048] [--samples 8] [--draft demo] [--parts scores,times]

MODEL: a directory or hub id, the demo model if left out. Every plan stores what calibrated SnapKV stores at 10% (claa
all of its first four layers), so that they differ in what they read. Samples are those of `kvsieve eval` with seed 0,
and all plans see the question. Times: all plans take turns on the same model object and the same prompt, starting with
another one each round; results are medians of rounds and of ratios to full KV within a round. Parts are added to
benchmarks/results/propagators.json, in place of those of the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.lab.bench.contenders import KvsieveMethod
from kvsieve.lab.bench.prompts import TokensPrompt
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks import chosen_tasks
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result

TASKS = "needle", "ruler_niah_multikey_1", "ruler_qa_1"
BUDGET = "10%"


def plans(model: Any, tokenizer: Any, draft: str | None) -> dict[str, kvsieve.Plan]:
    """By what to call them, full KV first."""
    fastkv = plan_without_floor("fastkv", budget=BUDGET).for_model(model, tokenizer)
    found = {"full": plan_without_floor("full"), "fastkv": fastkv}
    for name in ("claa", "staged"):
        found[name] = plan_without_floor(name, budget=BUDGET).for_model(model, tokenizer)
    if draft is not None:
        for name, lookahead in (("specprefill", 8), ("specprefill, lookahead 1", 1)):
            made = plan_without_floor("specprefill", draft=draft, keep="20%", lookahead=lookahead)
            found[name] = kvsieve.Plan(propagate=made.propagate, evict=fastkv.evict, name=made.name).for_model(
                model, tokenizer
            )
    return found


def scores(
    model: Any,
    tokenizer: Any,
    compared: dict[str, kvsieve.Plan],
    given: argparse.Namespace,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Scores and divergences from full KV per task; `done` gets them after every sample."""
    evaluator = Evaluator(model, tokenizer, chunk=1024)
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {name: {task: [] for task in TASKS} for name in compared}
    for index in range(given.samples):
        for task in chosen_tasks(TASKS):
            sample = task.sample(index, given.length, 0, evaluator.prompter.count)
            outcomes = evaluator.run(sample, list(compared.values()), "visible")
            for name, outcome in zip(compared, outcomes, strict=True):
                rows[name][task.name].append((outcome.metrics["score"], outcome.kl))
            print(f"sample {index}, {task.name}", flush=True)
        row = {
            name: {
                **{task: round(statistics.mean(score for score, _ in found), 3) for task, found in mine.items()},
                "kl": round(statistics.mean(kl for found in mine.values() for _, kl in found), 3),
            }
            for name, mine in rows.items()
        }
        done({"environment": environment(model), "samples_per_task": index + 1, "told": row})


def times(model: Any, tokenizer: Any, compared: dict[str, kvsieve.Plan], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token, and the ratios to full KV within each round."""
    evaluator = Evaluator(model, tokenizer)
    (needle,) = chosen_tasks(["needle"])
    encoded = evaluator.prompter.encode(needle.sample(0, given.length, 0, evaluator.prompter.count))
    prompt = TokensPrompt(torch.cat([encoded.context, encoded.question], 1))
    contenders = {name: KvsieveMethod(model, plan, name) for name, plan in compared.items()}
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    load = []
    for turn in range(given.rounds + 1):
        names = list(contenders)
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            seconds = contenders[name].run(prompt, 2)["ttft_s"]
            if turn:
                spent[name].append(seconds)
                load.append(os.getloadavg()[0])
        print(f"round {turn}", flush=True)

    def ratio(name: str, to: str) -> float:
        return round(statistics.median(a / b for a, b in zip(spent[name], spent[to], strict=True)), 3)

    return {
        "environment": environment(model),
        "prompt_tokens": prompt.ids.shape[1],
        "rounds": given.rounds,
        "threads": torch.get_num_threads(),
        "load_average": round(statistics.median(load), 2),
        "ttft_s": {name: round(statistics.median(runs), 3) for name, runs in spent.items()},
        "ratio_to_full": {name: ratio(name, "full") for name in spent},
        "ratio_to_fastkv": {name: ratio(name, "fastkv") for name in spent},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft", help="a draft model for specprefill, 'demo' or a directory; left out if none")
    parser.add_argument("--parts", default="scores,times")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "propagators.json")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model)
    name = kvsieve.models.fetch.MODEL_NAME if given.model is None else Path(given.model).name
    compared = plans(model, tokenizer, given.draft)

    def keep(part: str, found: dict[str, Any]) -> None:
        report = json.loads(given.out.read_text()) if given.out.exists() else {}
        mine = report.setdefault(name, {})
        mine |= {"length": given.length, "dtype": str(model.dtype).removeprefix("torch."), part: found}
        mine["plans"] = {label: plan.to_dict() for label, plan in compared.items()}
        write_result(given.out, report)

    if "scores" in given.parts:
        scores(model, tokenizer, compared, given, lambda found: keep("scores", found))
    if "times" in given.parts:
        keep("times", times(model, tokenizer, compared, given))


if __name__ == "__main__":
    main()
