"""Your own task: score methods, one of them your own, on questions about your own documents.

    python examples/compare_methods.py [--model MODEL]

Rows with a context, a question and an answer are all it takes; `kvsieve eval --task rows.jsonl` reads the same from a
file, goes on where it was stopped, and makes tables and pictures. Full KV always runs, as the reference.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import kvsieve
from kvsieve.methods import SnapKV
from kvsieve.types import LayerContext

MINUTES = (Path(__file__).parent / "minutes.txt").read_text(encoding="utf-8")
ANSWERS = {
    "What is the number of the order of the new radio?": "7294163",
    "What is the name of the dredger?": "Petrel",
    "When is the next meeting?": "14 June",
}
ROWS = [{"context": MINUTES, "question": question, "answer": answer} for question, answer in ANSWERS.items()]


@dataclass(frozen=True, kw_only=True)
class Mine(SnapKV):
    """SnapKV with votes weighed by the size of the values; window and kernel come with the model, as SnapKV's do."""

    def context_scores(self, ctx: LayerContext) -> Tensor:
        votes = super().context_scores(ctx)
        return votes * ctx.values[:, :, : votes.shape[-1]].float().norm(p=1, dim=-1)


METHODS = {name: f"{name}:budget=40%" for name in ("snapkv", "streamingllm")} | {"mine": Mine(budget="40%")}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
model, tokenizer = kvsieve.models.load(parser.parse_args().model)
table = kvsieve.Evaluator(model, tokenizer).compare(ROWS, METHODS)  # pandas.DataFrame(table) is a table too
for label in ("full", *METHODS):
    rows = [row for row in table if row["label"] == label]
    score, kl, stored = (sum(row[name] for row in rows) / len(rows) for name in ("score", "kl", "kv_entries"))
    print(f"{label:13} score {score:4.0%}   KL from full KV {kl:.3f}   {stored:.0f} entries per layer and head")
    # StreamingLLM keeps the beginning and the end of a prompt, whatever is asked: what stands between is lost.
    for row in rows:
        print(f"    {'right' if row['score'] else 'LOST '} {row['answers'][0]!r}")
