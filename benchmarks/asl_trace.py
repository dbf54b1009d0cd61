"""Relative rank variance per layer on the demo model: where, if anywhere, ASL would select.

    python benchmarks/asl_trace.py [--out benchmarks/results/asl_trace.json]

tau=0 never selects, so the whole trace from ASL's first layer on is seen. One sample of four tasks at two lengths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import kvsieve
from kvsieve.report.environment import environment
from kvsieve.tasks import chosen_tasks
from kvsieve.tasks.prompter import Prompter

TASKS = ("needle", "multiturn", "ruler_niah_single_1", "ruler_qa_1")
LENGTHS = (1024, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "asl_trace.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load_demo()
    prompter = Prompter(tokenizer, model.generation_config.eos_token_id)
    plan = kvsieve.plan("asl", budget="30%", tau=0, paper=True)
    first = plan.propagate.source(model.config.num_hidden_layers)
    rows = []
    for task in chosen_tasks(TASKS):
        for length in LENGTHS:
            ids = prompter.encode(task.sample(1, length, 0, prompter.count)).prompt
            with kvsieve.attach(model, plan) as sieve:
                report = sieve.generate(ids, max_new_tokens=1, do_sample=False).stats.report
            (trace,) = report["relative_variance"]
            rows.append({"task": task.name, "length": length, "relative_variance": [round(each, 3) for each in trace]})
            print(f"{task.name}, {length} tokens: lowest {min(trace):.2f} at layer {first + trace.index(min(trace))}")
    result = {"environment": environment(), "plan": plan.to_dict(), "first_layer": first, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
