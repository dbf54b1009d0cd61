"""Is Attention Matching (arXiv 2602.16284) at 5% nearer to full KV than KVzip at 25%?

    python benchmarks/answers/attention_matching.py MODEL [--length 2048] [--samples 6] [--tasks ruler_vt,...]
        [--settings "kvzip@25%,kvzip@5%,matching@5%,..."] [--out FILE]

The question is hidden: contexts are compacted before it is known. "matching" is the method `attentionmatching`; "keys"
stops after its first step, "biases" after the second, "off-policy" reads references above full KV. Other names are
methods.

Printed: the mean KL of full KV's next-token distributions over its own greedy answer, how often the likeliest token is
the same, the task's score, and the seconds to prefill the context and compact it. Every setting reads the same answer
tokens. The result is written after every prompt; prompts that it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from kvsieve.hf.attach import attach
from kvsieve.lab.tasks import all_tasks
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table
from kvsieve.shared.prompt import after_prompt, answer_logits, read_alone

TASKS = "ruler_niah_single_2,ruler_niah_multikey_1,ruler_niah_multivalue,ruler_vt,ruler_cwe,ruler_qa_1"
SETTINGS = "kvzip@25%,kvzip@5%,keys@5%,biases@5%,matching@5%,matching@10%,matching@25%"
# Settings that are Attention Matching with other parameters.
STEPS: dict[str, dict[str, bool]] = {
    "keys": {"biases": False, "values": False},
    "biases": {"values": False},
    "matching": {},
    "off-policy": {"on_policy": False},
}


def plan_of(setting: str, tokenizer: Any) -> Any:
    """Return the plan of a setting such as "kvzip@25%"."""
    name, _, share = setting.partition("@")
    method = "attentionmatching" if name in STEPS else name
    return plan_without_floor(method, budget=share, **STEPS.get(name, {})).for_tokenizer(tokenizer)


class Context:
    """A context that was prefilled under a plan before its question was known."""

    def __init__(self, model: Any, plan: Any, context: Tensor) -> None:
        began = time.perf_counter()
        self.model, self.plan = model, plan
        self.cache, _, _ = read_alone(model, plan, context)
        self.seconds = time.perf_counter() - began

    def logits(self, question: Tensor, answer: Tensor) -> Tensor:
        """Return the logits [T, V] before each token of an answer."""
        with attach(self.model, after_prompt(self.plan)) as sieve, torch.no_grad():
            copy = sieve.adopt(self.cache.fork())
            fed = torch.cat([question, answer[:, :-1]], 1)
            return answer_logits(sieve, copy, fed)[0, question.shape[1] - 1 :].float()

    def generate(self, question: Tensor, limit: int, stops: set[int]) -> list[int]:
        tokens: list[int] = []
        with attach(self.model, after_prompt(self.plan)) as sieve, torch.no_grad():
            copy = sieve.adopt(self.cache.fork())
            ids = question
            while len(tokens) < limit and not (tokens and tokens[-1] in stops):
                tokens.append(int(answer_logits(sieve, copy, ids)[0, -1].argmax()))
                ids = torch.tensor([[tokens[-1]]])
        return tokens


def measured(model: Any, prompter: Prompter, task: Any, at: int, given: Any) -> dict[str, Any]:
    """Return the row of one prompt: distances and scores by setting."""
    sample = task.sample(at, given.length, 0, prompter.count)
    turn, ids = sample.turns[0], prompter.encode(sample)
    stops, limit = set(prompter.stops), turn.max_new_tokens
    full = Context(model, kvsieve.plan("full"), ids.context)
    tokens = full.generate(ids.question, limit, stops)
    answer = torch.tensor([tokens])
    wanted = full.logits(ids.question, answer).log_softmax(-1)
    row: dict[str, Any] = {"task": task.name, "sample": at, "tokens": ids.prompt.shape[1], "settings": {}}
    row["full"] = turn.score(prompter.answer(tokens)[0], turn.answers)["score"]
    for setting in given.settings.split(","):
        context = Context(model, plan_of(setting, prompter.tokenizer), ids.context)
        found = context.logits(ids.question, answer).log_softmax(-1)
        said = context.generate(ids.question, limit, stops)
        row["settings"][setting] = {
            "kl": float((wanted.exp() * (wanted - found)).sum(-1).mean()),
            "same": float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
            "score": turn.score(prompter.answer(said)[0], turn.answers)["score"],
            "seconds": context.seconds,
        }
    return row


def table(rows: list[dict[str, Any]], settings: list[str]) -> str:
    lines = [["full", "0", "1", f"{mean(row['full'] for row in rows):.3f}", ""]]
    for setting in settings:
        found = [row["settings"][setting] for row in rows if setting in row["settings"]]
        if found:
            numbers = {name: mean(one[name] for one in found) for name in found[0]}
            lines.append([setting, f"{numbers['kl']:.3f}", f"{numbers['same']:.3f}", f"{numbers['score']:.3f}"])
            lines[-1].append(f"{numbers['seconds']:.1f}")
    return markdown_table(["setting", "KL", "same token", "score", "seconds"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="checkpoint")
    parser.add_argument("--length", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--samples", type=int, default=6, help="prompts per task (default: 6)")
    parser.add_argument("--tasks", default=TASKS, help=f"generated tasks (default: {TASKS})")
    parser.add_argument("--settings", default=SETTINGS, help=f"(default: {SETTINGS})")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model, dtype=torch.bfloat16)
    prompter = Prompter(tokenizer, model.generation_config.eos_token_id)
    tasks = all_tasks()
    rows = json.loads(given.out.read_text())["rows"] if given.out and given.out.exists() else []
    for at in range(given.samples):
        for name in given.tasks.split(","):
            if any((row["task"], row["sample"]) == (name, at) for row in rows):
                continue
            rows.append(measured(model, prompter, tasks[name], at, given))
            print(name, at, {key: round(one["kl"], 3) for key, one in rows[-1]["settings"].items()}, flush=True)
            if given.out:
                write_result(given.out, {"environment": environment(model), "length": given.length, "rows": rows})
    print(table(rows, given.settings.split(",")))


if __name__ == "__main__":
    main()
