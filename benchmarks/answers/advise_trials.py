"""Does the loss of what `kvsieve advise` recommends lie within the interval that it states, on other documents?

    python benchmarks/answers/advise_trials.py [MODEL] [--trials 10] [--length 2048] [--samples 2]
        [--methods snapkv,adakv] [--budgets 10%,25%] [--memory 0.3] [--first 0] [--out FILE]

MODEL: a directory or hub id, the demo model if left out. The limit is on the memory, a share of what full KV takes, so
that full KV, which loses nothing, is never the answer. Each trial advises on documents of its own seed (generated
prompts; no times), then runs the recommended plan on as many documents of another seed, which neither part of the
advice has seen, and counts whether the mean loss over them lies within the interval. Trials are added to the file as
they end; those of the same model, length, limit and seed are replaced.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import kvsieve
from kvsieve.cli.specs import method_specs
from kvsieve.lab.advise import AdviceOptions, PlanLimits, advise, built_in
from kvsieve.lab.advise.measure import least_memory_at, measure_losses
from kvsieve.lab.eval.cells import setting
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.report.environment import environment, write_result

KEY = ("model", "length", "seed", "memory")
# Documents of trials stand apart from those of every advice.
_FRESH = 500


def trial(model: Any, tokenizer: Any, options: AdviceOptions, share: float) -> dict[str, Any]:
    """One advice, and the loss of its plan on other documents."""
    began = time.perf_counter()
    material = built_in()
    advice = advise(model, tokenizer, options, material)
    row: dict[str, Any] = {
        "length": options.measure_at,
        "seed": options.seed,
        "memory": share,
        "samples": options.samples,
        "measured": [each.name for each in advice.candidates],
    }
    if advice.choice is None:
        assert advice.nearest is not None
        return {**row, "plan": None, "nearest": advice.nearest[0].name, "seconds": time.perf_counter() - began}
    chosen = advice.choice
    evaluator = Evaluator(model, tokenizer)
    length, count = advice.measured_at, evaluator.prompter.count
    fresh = material.drawn(0, options.samples, length, _FRESH + options.seed, count)
    settings = [setting("full", {}), chosen.plan.setting]
    losses = measure_losses(evaluator, fresh, settings, options.question, lambda what: None)[1]
    loss = losses.mean(losses.loss, list(losses.loss))
    low, high = chosen.interval
    return {
        **row,
        "plan": chosen.plan.name,
        "chosen_by": round(chosen.plan.loss, 5),
        "stated": round(chosen.loss, 5),
        "interval": [round(low, 5), round(high, 5)],
        "fresh": round(loss, 5),
        "within": low <= loss <= high,
        "lost": chosen.plan.lost,
        "survive": chosen.survive,
        "fresh_lost": losses.lost,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--methods", default="snapkv,adakv")
    parser.add_argument("--budgets", default="10%,25%")
    parser.add_argument("--memory", type=float, default=0.3, help="Limit, as a share of full KV's.")
    parser.add_argument("--first", type=int, default=0, help="Seed of the first trial.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "advise_trials.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load(arguments.model)
    name = kvsieve.models.fetch.MODEL_NAME if arguments.model is None else Path(arguments.model).name
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"environments": [], "trials": []}
    report["environments"].append(environment(model))
    rows = {tuple(row[part] for part in KEY): row for row in report["trials"]}
    full = least_memory_at(Evaluator(model, tokenizer), setting("full", {}).plan, arguments.length)
    for seed in range(arguments.first, arguments.first + arguments.trials):
        options = AdviceOptions(
            context=arguments.length,
            limits=PlanLimits(memory=int(arguments.memory * full)),
            methods=tuple(method_specs(arguments.methods)),
            budgets=tuple(arguments.budgets.split(",")),
            samples=arguments.samples,
            measure_at=arguments.length,
            cost_samples=0,
            seed=seed,
        )
        row = {
            "model": name,
            **trial(model, tokenizer, options, arguments.memory),
            "env": len(report["environments"]) - 1,
        }
        rows[tuple(row[part] for part in KEY)] = row
        report["trials"] = list(rows.values())
        write_result(arguments.out, report)
        print({part: row.get(part) for part in ("seed", "plan", "stated", "interval", "fresh", "within", "seconds")})
    mine = [row for row in report["trials"] if row["model"] == name and row["plan"] is not None]
    print(f"{name}: {sum(row['within'] for row in mine)} of {len(mine)} within the stated interval")


if __name__ == "__main__":
    main()
