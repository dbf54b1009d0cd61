"""What sparse prompts save, and lose: time to the first token beside own full KV, scores, and the distance to full KV.

    python benchmarks/answers/sparse_prompts.py [--model DIR] [--lengths 2048,7500] [--samples 4] [--rounds 3]
        [--out FILE]
    python benchmarks/answers/sparse_prompts.py --prefills xattention --methods fastkv --budget 10% --transformers ...

quality: samples of the needle task and of RULER's multikey needles, the question visible. kl: mean over the tokens of
full KV's own answer, in nats, of KL(full KV || plan). score: of the answer that the plan gives. density and recall: as
the statistics tell them, means over samples.

time: a prompt is read under full KV and every plan in turn, after one round that does not count, of its first tokens
with `--warm-up`. ttft: median over rounds of a plan's seconds over those of full KV in the same round;
ttft_to_transformers: over those of transformers' own call, which `--transformers` adds. products: share of that time
which products with weights take, that a sparse prompt leaves as they are, by torch's profiler in one more reading;
`--products` adds it. `--methods`: plans of these methods, alone and with every sparse prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

import kvsieve
from kvsieve.hf.compat import CACHE
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks import chosen_tasks
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.plans import Plan
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

PREFILLS = (
    "xattention,xattention:threshold=0.8,xattention:threshold=0.95,flashprefill,flexprefill,minference,a-shape,"
    "a-shape:local=2048"
)
TASKS = ("needle", "ruler_niah_multikey_1")
FULL, THEIRS = "full", "transformers"


def quality(model: Any, tokenizer: Any, plans: dict[str, Plan], length: int, samples: int) -> list[dict[str, Any]]:
    """One row per task and plan: means over the samples."""
    evaluator, rows = Evaluator(model, tokenizer), []
    for task in chosen_tasks(list(TASKS)):
        found: dict[str, list[Any]] = {name: [] for name in plans}
        for index in range(samples):
            # Depths all over the text.
            sample = task.sample(index * 11 // samples, length, index, evaluator.prompter.count)
            for name, one in zip(plans, evaluator.run(sample, list(plans.values()), "visible"), strict=True):
                found[name].append(one)
            print(f"{task.name}, {length} tokens: {index + 1} of {samples}", flush=True)
        for name, outcomes in found.items():
            blocks = [each.record.blocks for each in outcomes]
            row: dict[str, Any] = {"tokens": length, "task": task.name, "plan": name}
            row["kl"] = round(statistics.mean(each.kl for each in outcomes), 5)
            row["score"] = round(statistics.mean(each.metrics["score"] for each in outcomes), 4)
            row["density"] = _mean([each.computed / each.causal for each in blocks if each.causal])
            row["recall"] = _mean([each.recall / each.sampled for each in blocks if each.sampled])
            rows.append(row)
    return rows


def _mean(values: list[float]) -> float | None:
    return round(statistics.mean(values), 4) if values else None


def times(
    model: Any, tokenizer: Any, plans: dict[str, Plan | None], length: int, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per plan: medians of ratios of times to the first token. None: transformers' own call."""
    (task,) = chosen_tasks(["needle"])
    evaluator = Evaluator(model, tokenizer)
    text = task.sample(5, length, 0, evaluator.prompter.count).context
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :length]
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for at in range(given.rounds + 1):
        for name, plan in plans.items():
            took = first_token(model, plan, ids if at else ids[:, : given.warm_up])
            if at:
                seconds[name].append(took)
        print(f"time, {length} tokens: round {at} of {given.rounds}", flush=True)
    rows = []
    for name, mine in seconds.items():
        row: dict[str, Any] = {"tokens": length, "plan": name}
        for key, other in (("ttft", FULL), ("ttft_to_transformers", THEIRS)):
            if other in seconds:
                row[key] = round(statistics.median(a / b for a, b in zip(mine, seconds[other], strict=True)), 4)
        row["ttft_s"] = round(statistics.median(mine), 3)
        rows.append(row | ({"products": products_of(model, plans[name], ids)} if given.products else {}))
    return rows


def products_of(model: Any, plan: Plan | None, ids: torch.Tensor) -> float:
    """Share of the time to the first token that products with weights take."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        took = first_token(model, plan, ids)
    spent = sum(each.self_cpu_time_total for each in seen.key_averages() if each.key in ("aten::mm", "aten::addmm"))
    return round(spent / 1e6 / took, 3)


def first_token(model: Any, plan: Plan | None, ids: torch.Tensor) -> float:
    """Seconds to the first token."""
    with torch.no_grad():
        if plan is None:
            began = time.perf_counter()
            logits = model(ids, **{CACHE: DynamicCache(config=model.config)}, logits_to_keep=1).logits
            logits[0, -1].argmax().item()
            return time.perf_counter() - began
        with kvsieve.attach(model, plan) as sieve:
            took: float = sieve.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0).stats.ttft_s
            return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="A directory or hub id. Default: the demo model.")
    parser.add_argument("--lengths", default="2048,7500")
    parser.add_argument("--samples", type=int, default=4, help="0 leaves quality out.")
    parser.add_argument("--rounds", type=int, default=3, help="0 leaves times out.")
    parser.add_argument("--warm-up", type=int, help="Tokens of the round that does not count. Default: all.")
    parser.add_argument("--prefills", default=PREFILLS)
    parser.add_argument("--methods", default="", help="Plans of these methods too, alone and with every sparse prompt.")
    parser.add_argument("--budget", default="10%", help="Of these methods.")
    parser.add_argument("--transformers", action="store_true", help="Time transformers' own call too.")
    parser.add_argument("--products", action="store_true", help="Profile products with weights.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "sparse_prompts.json")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model)
    name = given.model or "SmolLM2-135M-Instruct (demo model)"
    prefills = [each for each in given.prefills.split(",") if each]
    plans = {FULL: Plan(), **{each: plan_without_floor(FULL, prefill=each) for each in prefills}}
    for method in filter(None, given.methods.split(",")):
        label = f"{method} {given.budget}"
        plans[label] = plan_without_floor(method, budget=given.budget)
        plans |= {
            f"{label}, {each}": plan_without_floor(method, budget=given.budget, prefill=each) for each in prefills
        }
    timed: dict[str, Plan | None] = {THEIRS: None, **plans} if given.transformers else {**plans}
    report: dict[str, Any] = {
        "environment": environment(model),
        "model": f"{Path(name).name}, {str(model.dtype).removeprefix('torch.')}",
        "samples": given.samples,
        "quality": [],
        "time": [],
    }
    for length in map(int, given.lengths.split(",")):
        if given.rounds:
            report["time"] += times(model, tokenizer, timed, length, given)
        if given.samples:
            report["quality"] += quality(model, tokenizer, plans, length, given.samples)
        write_result(given.out, report)
    for part, keys in (
        ("time", ("tokens", "plan", "ttft", "ttft_to_transformers", "ttft_s", "products")),
        ("quality", ("tokens", "task", "plan", "kl", "score", "density", "recall")),
    ):
        if report[part]:
            print(markdown_table(list(keys), [[str(row.get(key, "")) for key in keys] for row in report[part]]))


if __name__ == "__main__":
    main()
