"""Weights in blocks change no token: greedy answers in float32 of a GGUF file in blocks and of its expanded weights.

    python benchmarks/answers/identical_weights.py FILE.gguf [--data DIR] [--prompts 50] [--few 10]
        [--cases "full;snapkv:budget=25%;full+lookup"] [--out FILE]

A case is a plan, with the source of drafts behind "+". The first case has --prompts prompts, the others --few. Prompts
are questions about the beginnings of L-Eval's documents (files of --data, *.jsonl.gz), of Python's modules and of the
demo's document, of 100 to 500 tokens. Products with blocks sum in another order, so logits differ
in their last digits. Where answers differ, the result has the first position, and by how much the logit of the expanded
weights' token exceeds that of the other one there. Exits 1 on any difference. The result is written after every prompt;
prompts that it has are not run again.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from benchmarks.answers.identical_drafts import NEW_TOKENS, answers, difference, known_rows
from benchmarks.speed.copying import MODULES
from kvsieve.models.quantized import QuantizedLinear
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.specs import split_specs
from kvsieve.planning.turns import render, token_ids
from kvsieve.report.environment import environment, write_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "weights_identical.json"
CASES = ("full", "snapkv:budget=25%", "kivi:bits=4:block=32:tail=32", "full+lookup")
MINUTES = (
    "Who was there?",
    "What was decided?",
    "What costs the most?",
    "What is still open?",
    "When do they meet again?",
)


def questions(data: Path | None, count: int) -> list[str]:
    """Return texts with a question each, of several kinds in turns."""
    minutes = (ROOT / "examples" / "minutes.txt").read_text(encoding="utf-8")
    kinds = [
        [
            f"{inspect.getsource(importlib.import_module(name))[: size(at)]}\n\nExplain this code."
            for at, name in enumerate(MODULES)
        ],
        [f"{minutes[at * 500 :][: size(at)]}\n\n{question}" for at, question in enumerate(MINUTES)],
    ]
    for file in sorted(data.glob("*.jsonl.gz")) if data is not None else []:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        kinds.append([f"{row['input'][: size(at)]}\n\n{row['instructions'][0]}" for at, row in enumerate(rows)])
    longest = max(map(len, kinds))
    found = [kind[at] for at in range(longest) for kind in kinds if at < len(kind)]
    if len(found) < count:
        sys.exit(f"error: {len(found)} prompts, wanted are {count}: name L-Eval's files with --data")
    return found[:count]


def size(number: int) -> int:
    """Return the characters of a document."""
    return 400 + number * 337 % 1200


def in_blocks(model: Any) -> bool:
    return any(isinstance(part, QuantizedLinear) for part in model.modules())


def compared(models: list[Any], case: str, ids: torch.Tensor) -> dict[str, Any]:
    """Return the count of tokens of an answer, and where those of two models differ. models: blocks, expanded."""
    plan, _, draft = case.partition("+")
    ((name, parameters),) = split_specs(plan)
    tokens = []
    for model in models:
        with kvsieve.attach(model, plan_without_floor(name, **parameters)) as sieve:
            ((answer,), counts) = answers(sieve, [ids], draft or None)
            tokens.append(answer)
            row: dict[str, Any] = {"tokens": len(answer), "accepted": counts["accepted"]}
            if model is models[-1] and tokens[0] != answer:
                row["difference"] = difference(sieve, ids, answer, tokens[0])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="GGUF file")
    parser.add_argument("--data", type=Path, help="folder with L-Eval's files (default: none)")
    parser.add_argument("--prompts", type=int, default=50, help="of the first case (default: 50)")
    parser.add_argument("--few", type=int, default=10, help="prompts of the others (default: 10)")
    parser.add_argument("--cases", default=";".join(CASES), help="separated by semicolons")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    blocks, tokenizer = kvsieve.models.load(arguments.file, torch.float32, "cpu")
    expanded, _ = kvsieve.models.load(arguments.file, torch.float32, "cpu", weights="expand")
    if not in_blocks(blocks) or in_blocks(expanded):
        sys.exit("error: expected one model in blocks and one expanded")
    texts = questions(arguments.data, arguments.prompts)
    prompts = [token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": text}])) for text in texts]
    rows = known_rows(arguments.out)
    stamp = environment(arguments.file)
    for number, case in enumerate(arguments.cases.split(";")):
        count = arguments.few if number else arguments.prompts
        key = f"{arguments.file.name}, {case}"
        empty = {"file": arguments.file.name, "case": case, "prompts": 0, "tokens": 0, "accepted": 0, "differences": []}
        row = rows.setdefault(key, {**empty, "seconds": 0.0})
        for at in range(row["prompts"], count):
            began = time.perf_counter()
            found = compared([blocks, expanded], case, torch.tensor([prompts[at]]))
            row["tokens"] += found["tokens"]
            row["accepted"] += found["accepted"]
            row["differences"] += [{"prompt": at, **found["difference"]}] if "difference" in found else []
            row["seconds"] = round(row["seconds"] + time.perf_counter() - began, 1)
            row["prompts"] = at + 1
            write_result(arguments.out, {"environment": stamp, "new_tokens": NEW_TOKENS, "rows": rows})
        print(
            f"{key}: {row['prompts']} prompts, {row['tokens']} tokens, {row['differences'] or 'identical'}", flush=True
        )
    wrong = sum(len(row["differences"]) for row in rows.values())
    print(f"{wrong} answers differ" if wrong else "all identical")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
