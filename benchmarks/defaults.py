"""What methods answer with the paper's defaults, with those that follow from the model, and with its profile.

    python benchmarks/defaults.py [MODEL] [--lengths 1024,2048] [--tasks needle,kv] [--samples 1,2,4]

MODEL: a directory or hub id, the demo model if left out. Samples are those of `kvsieve eval` with seed 0; sample 3 is
what kvsieve.defaults was chosen on. All plans read the same prompts, greedily, and see the question. Rows are
added to benchmarks/results/defaults.json, in place of those of the same sample and plan.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import kvsieve
from kvsieve.defaults import digits_per_token
from kvsieve.eval.evaluator import Evaluator
from kvsieve.named import plan_without_floor
from kvsieve.profiles import Fingerprint
from kvsieve.report.environment import environment
from kvsieve.tasks import chosen_tasks

METHODS = {"snapkv": "10%", "adakv": "10%", "fastkv": "10%", "gemfilter": "20%"}
KEY = ("model", "task", "length", "sample", "method", "defaults")


def plans(model: Any, tokenizer: Any) -> dict[tuple[str, str], kvsieve.Plan]:
    """(method, which defaults) -> plan, full KV first."""
    shape = Fingerprint.of(model)
    found = {("full", "paper"): plan_without_floor("full")}
    for name, budget in METHODS.items():
        derived = kvsieve.method_info(name).derive(shape, digits_per_token(tokenizer))
        found[name, "paper"] = plan_without_floor(name, budget=budget, paper=True)
        found[name, "derived"] = plan_without_floor(name, budget=budget, paper=True, **derived)
        own = plan_without_floor(name, budget=budget).for_model(model, tokenizer)
        if own.profile is not None:
            found[name, "profile"] = own
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lengths", default="1024,2048")
    parser.add_argument("--tasks", default="needle,ruler_niah_multikey_1,kv")
    parser.add_argument("--samples", default="1,2,4")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "defaults.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load(arguments.model)
    name = kvsieve.models.fetch.MODEL_NAME if arguments.model is None else Path(arguments.model).name
    evaluator = Evaluator(model, tokenizer)
    compared = plans(model, tokenizer)
    report = (
        json.loads(arguments.out.read_text())
        if arguments.out.exists()
        else {"environments": [], "plans": {}, "rows": []}
    )
    report["plans"][name] = {" ".join(key): plan.to_dict() for key, plan in compared.items()}
    rows = {tuple(row[part] for part in KEY): row for row in report["rows"]}
    report["environments"].append(environment())
    for index in map(int, arguments.samples.split(",")):
        for length in map(int, arguments.lengths.split(",")):
            for task in chosen_tasks(arguments.tasks.split(",")):
                sample = task.sample(index, length, 0, evaluator.prompter.count)
                outcomes = evaluator.run(sample, list(compared.values()), "visible")
                for (method, defaults), outcome in zip(compared, outcomes, strict=True):
                    key = (name, task.name, length, index, method, defaults)
                    told = {"score": outcome.metrics["score"], "kl": round(outcome.kl, 4), "answer": outcome.answers[0]}
                    rows[key] = {**dict(zip(KEY, key, strict=True)), **told, "env": len(report["environments"]) - 1}
                print(f"{name}: sample {index}, {task.name} at {length}", flush=True)
                report["rows"] = list(rows.values())
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report["rows"])


def print_table(rows: list[dict[str, Any]]) -> None:
    """Per model and plan: right answers of those that full KV gives, and the mean divergence from it."""
    cell = ("model", "task", "length", "sample")
    known = {tuple(row[part] for part in cell) for row in rows if row["method"] == "full" and row["score"] == 1}
    print("| model | method | defaults | right of full KV's | KL |\n|---|---|---|---|---|")
    for model, method, defaults in dict.fromkeys((row["model"], row["method"], row["defaults"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["method"], row["defaults"]) == (model, method, defaults)]
        right = [row["score"] == 1 for row in mine if tuple(row[part] for part in cell) in known]
        kl = sum(row["kl"] for row in mine) / len(mine)
        print(f"| {model} | {method} | {defaults} | {sum(right)} of {len(right)} | {kl:.2f} |")


if __name__ == "__main__":
    main()
