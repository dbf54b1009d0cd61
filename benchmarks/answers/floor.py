"""What a share costs short prompts, and how large a floor makes their answers full KV's.

    python benchmarks/answers/floor.py [MODEL] [--out benchmarks/results/floor.json]

Twenty questions of 35 to 50 tokens and documents of 150 to 1,200 tokens with a fact, each asked for the fact, for a
summary, for its first sentence and for three words of it, are answered greedily, in 16 tokens, under full KV and under
shares with each floor. Counted are answers that equal full KV's, and how many of their first tokens agree. MODEL: a
directory or hub id, the demo model if left out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import kvsieve
from kvsieve.cli.document import QUESTION, build_document
from kvsieve.planning.turns import render, token_ids
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

FLOORS = (0, 64, 128, 256, 512, 1024)
PLANS = {"snapkv": {"budget": "20%"}, "fastkv": {"budget": "10%"}}
LENGTHS = (150, 300, 600, 1200)
DEPTHS = (0.5,)
NEW_TOKENS = 16
WORDS = ("France", "water", "the moon", "bread", "Shakespeare")
SHORT = (
    "What is the capital of {0}, if {0} has one?",
    "Tell me one fact about {0}.",
    "Write one sentence in which {0} appears.",
    "How would you explain {0} to a child?",
)
ASKED = (
    QUESTION,
    "What is the text above about? Answer in one sentence.",
    "Repeat the first sentence of the text.",
    "Name three words of the text.",
)


def questions(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Each question, and the group that it is counted in."""
    for word in WORDS:
        for form in SHORT:
            yield "a question", form.format(word)
    chance = random.Random(0)
    for length in LENGTHS:
        for depth in DEPTHS:
            text = build_document(tokenizer, length, depth, str(chance.randrange(10**6, 10**7)))
            for asked in ASKED:
                yield f"{length} tokens", f"{text}\n\n{asked}"


def answered(model: Any, plan: kvsieve.Plan, ids: torch.Tensor) -> list[int]:
    with kvsieve.attach(model, plan) as sieve:
        made = sieve.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False).sequences
    return made[0, ids.shape[1] :].tolist()


def alike(mine: list[int], full: list[int]) -> float:
    """The share of full KV's answer that an answer begins with."""
    same = next((at for at, pair in enumerate(zip(mine, full, strict=False)) if pair[0] != pair[1]), None)
    return min(len(mine), len(full)) / len(full) if same is None else same / len(full)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "floor.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load(arguments.model)
    rows: list[dict[str, Any]] = []
    for group, text in questions(tokenizer):
        ids = torch.tensor([token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": text}]))])
        length, full = ids.shape[1], answered(model, kvsieve.Plan(), ids)
        for name, given in PLANS.items():
            # Floors that keep as many entries give the same answer.
            known: dict[int, list[int]] = {}
            for floor in FLOORS:
                kept = length if floor >= length else max(floor, int(length * float(given["budget"].rstrip("%")) / 100))
                if kept not in known:
                    plan = kvsieve.plan(name, **given, floor=floor)
                    known[kept] = full if floor >= length else answered(model, plan, ids)
                row = {"group": group, "tokens": length, "method": name, "floor": floor}
                rows.append({**row, "equal": known[kept] == full, "alike": round(alike(known[kept], full), 3)})
        print(group, length, flush=True)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    table = []
    for name in PLANS:
        for floor in FLOORS:
            mine = [row for row in rows if (row["method"], row["floor"]) == (name, floor)]
            parts = [[row for row in mine if row["group"] == group] for group in groups]
            cells = [f"{fmean(r['equal'] for r in part):.0%}, {fmean(r['alike'] for r in part):.0%}" for part in parts]
            table.append([name, str(floor), *cells])
    name = kvsieve.models.fetch.MODEL_NAME if arguments.model is None else Path(arguments.model).name
    stamp = {"environment": environment(model), "model": name, "dtype": str(model.dtype).removeprefix("torch.")}
    report = {**stamp, "plans": PLANS, "new_tokens": NEW_TOKENS, "rows": rows}
    write_result(arguments.out, report)
    print(markdown_table(["method", "floor", *groups], table))


if __name__ == "__main__":
    main()
