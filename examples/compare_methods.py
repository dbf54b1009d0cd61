"""Compare methods on a task of `kvsieve eval` from Python: scores, distance from full KV, and what was stored.

    python examples/compare_methods.py [--model MODEL] [--length 1024] [--samples 3]

`kvsieve eval` runs whole grids of this, goes on where it was stopped, and makes
tables and pictures (docs/evaluation.md).
"""

import argparse
from collections import defaultdict

import kvsieve
from kvsieve.eval.evaluator import Evaluator
from kvsieve.tasks import chosen_tasks

# Short prompts are to show what a share drops, so it has no floor.
PLANS = {
    "full": kvsieve.plan("full"),  # the reference comes first
    "streamingllm 20%": kvsieve.plan("streamingllm", budget="20%", floor=0),
    "snapkv 20%": kvsieve.plan("snapkv", budget="20%", floor=0),
    "snapkv 20%, the paper's kernel of 7": kvsieve.plan("snapkv", budget="20%", kernel=7, floor=0),
    "fastkv 20%": kvsieve.plan("fastkv", budget="20%", floor=0),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
parser.add_argument("--samples", type=int, default=3)
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)
evaluator = Evaluator(model, tokenizer)
(task,) = chosen_tasks(["needle"])
outcomes = defaultdict(list)
for index in range(given.samples):
    sample = task.sample(index, given.length, seed=0, count=evaluator.prompter.count)
    for name, outcome in zip(PLANS, evaluator.run(sample, list(PLANS.values()), "visible"), strict=True):
        outcomes[name].append(outcome)

print(f"{task.title}, {given.samples} samples of {given.length} tokens, the question visible")
for name, runs in outcomes.items():
    score = sum(run.metrics["score"] for run in runs) / len(runs)
    kl = sum(run.kl for run in runs) / len(runs)
    stored = sum(sum(run.record.kept.values()) / len(run.record.kept) for run in runs) / len(runs)
    print(f"{name:38} score {score:4.0%}   KL from full KV {kl:.3f}   {stored:.0f} entries per layer and head")
