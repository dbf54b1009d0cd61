"""A checkpoint in 16 bits, in float32: its weights as stored beside the same weights expanded.

    python benchmarks/speed/stored.py CHECKPOINT [--lengths 64,1024,4096] [--new-tokens 64] [--rounds 3] [--threads 2]
        [--out FILE]

Each form has a process of its own and waits while the other one runs; in every round both answer the same prompt, in
another order. KV is full. The result has the rounds, medians, and medians of ratios within a round. Memory is the
resident peak of a fresh process for each prompt, mapped pages included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import kvsieve
from benchmarks.speed.weights import WARM, Worker, prompt
from kvsieve.hf.generate.peak_memory import resident
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.models import load_tokenizer
from kvsieve.models.quantized import matrices_of, weight_bytes
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

RESULTS = Path(__file__).parents[1] / "results" / "weights_stored.json"
STORED, EXPANDED = "stored", "expanded"
FORMS = {STORED: None, EXPANDED: "expand"}
TIMES = ("ttft_s", "tpot_s")


def work(checkpoint: str, form: str) -> None:
    """Answer prompts, one JSON object a line; the first line of output describes the process."""
    process = resident()
    model, _ = kvsieve.models.load(checkpoint, torch.float32, "cpu", weights=FORMS[form])
    if bool(matrices_of(model)) != (form == STORED):
        sys.exit(f"error: the weights of {checkpoint} cannot stay as stored here")
    print(json.dumps({"process_bytes": process, "weight_bytes": weight_bytes(model)}), flush=True)
    with kvsieve.attach(model, plan_without_floor("full")) as sieve:
        for line in sys.stdin:
            request = json.loads(line)
            count = request["new_tokens"]
            options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            stats = sieve.generate(torch.tensor([request["ids"]]), **options).stats
            print(json.dumps({name: getattr(stats, name) for name in (*TIMES, "kv_bytes")}), flush=True)


def start(arguments: argparse.Namespace, form: str) -> Worker:
    """Start a process with the weights in a form."""
    return Worker([sys.executable, __file__, arguments.checkpoint, "--work", form], arguments.threads)


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return rounds and memory by the prompt's tokens."""
    text = text_ids(load_tokenizer(arguments.checkpoint))
    workers = {form: start(arguments, form) for form in FORMS}
    found: dict[str, dict[str, Any]] = {}
    for worker in workers.values():
        worker.answer(prompt(text, WARM, 0), 8)
    for length in arguments.lengths:
        rounds: list[dict[str, Any]] = []
        for number in range(arguments.rounds):
            order = list(FORMS)[:: 1 if number % 2 else -1]
            ids = prompt(text, length, number)
            rounds.append({form: workers[form].answer(ids, arguments.new_tokens) for form in order})
            print(length, json.dumps(rounds[-1]), flush=True)
        found[str(length)] = {"rounds": rounds}
    for worker in workers.values():
        worker.close()
    for length, row in found.items():
        row["memory"] = {}
        for form in FORMS:
            worker = start(arguments, form)
            ids = prompt(text, int(length), 0)
            row["memory"][form] = worker.weighed(ids, arguments.new_tokens, ".safetensors")
            worker.close()
        row["summary"] = summary(row["rounds"], row["memory"])
    return found


def summary(rounds: list[dict[str, Any]], memory: dict[str, Any]) -> dict[str, Any]:
    """Return medians of times and the memory of each form, and ratios of stored to expanded weights."""
    found: dict[str, Any] = {form: {"peak_bytes": memory[form]["peak_bytes"]} for form in FORMS}
    ratios = {"peak_bytes": memory[STORED]["peak_bytes"] / memory[EXPANDED]["peak_bytes"]}
    for time in TIMES:
        for form in FORMS:
            found[form][time] = statistics.median(row[form][time] for row in rounds)
        ratios[time] = statistics.median(row[STORED][time] / row[EXPANDED][time] for row in rounds)
    return {**found, "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()}}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the summaries as Markdown."""
    cells = []
    for length, row in found.items():
        for form in FORMS:
            part = row["summary"][form]
            line = [length, form, f"{part['ttft_s']:.3f} s", f"{1000 * part['tpot_s']:.1f} ms"]
            cells.append([*line, f"{part['peak_bytes'] / 2**20:,.0f} MiB"])
        ratio = row["summary"]["ratio"]
        cells.append([length, "ratio", *(f"{ratio[name]:.2f}" for name in (*TIMES, "peak_bytes"))])
    return markdown_table(["tokens", "weights", "first token", "each later", "peak"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", help="directory of a checkpoint in bfloat16 or float16")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=[64, 1024, 4096])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.checkpoint, arguments.work)
        return
    found = measured(arguments)
    name = Path(arguments.checkpoint).resolve().name
    settings = {"model": name, "new_tokens": arguments.new_tokens, "threads": arguments.threads}
    write_result(arguments.out, {**settings, "environment": environment(Path(arguments.checkpoint)), "lengths": found})
    print(table(found))


if __name__ == "__main__":
    main()
