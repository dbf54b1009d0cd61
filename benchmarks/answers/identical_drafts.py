"""Drafts change no token: greedy answers in float32 with and without, of tiny models, under plans of every kind.

    python benchmarks/answers/identical_drafts.py [--families llama,gpt_oss] [--plans "full;kivi:bits=4"]
        [--prompts 200] [--draft lookup:adapt=false] [--out FILE]

A family is one of tests/support/tiny_models, with random weights, or "demo", the demo model. Embeddings of tiny models
are changed so that most tokens choose the next one and answers run in circles, which attention breaks now and then:
drafts are accepted and refused. A family and plan for which none was accepted, or all were, prove nothing and fail.
Where answers differ, the result has the first position, and by how much the logit of the first answer's token exceeds
that of the other's there. Exits 1 on any difference. Families and plans that the result has are not run again;
processes with different families may share its file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import kvsieve
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.specs import split_specs
from kvsieve.report.environment import environment, write_result
from tiny_models import build

RESULTS = Path(__file__).parents[1] / "results" / "drafts_identical.json"
# Factors of the embeddings: larger ones leave less to attention.
FAMILIES = {
    "llama": 24.0,
    "gemma3_text": 1.2,
    "gpt_oss": 22.0,
    "qwen3_moe": 8.0,
    "gemma3n_text": 4.0,
    "qwen3_next": 10.0,
}
# Tokens of a circle.
CIRCLE = 8
# Windows, lags and blocks are small enough that all of them act within prompts and answers.
PLANS = (
    "full",
    "snapkv:budget=25%:window=16",
    "adakv:budget=25%:window=16",
    "lagkv:budget=40%:lag=16:sinks=4",
    "h2o:budget=25%",
    "rocketkv:budget=48:window=16",
    "kivi:bits=4:block=16:tail=16",
)
NEW_TOKENS = 48
# Few different tokens, so that the last ones often occur before.
TOKENS = 24


def circling(family: str) -> Any:
    """Return a tiny model whose answers run in circles."""
    model = build(family)
    given = model.get_input_embeddings().weight
    with torch.no_grad():
        following = given.reshape(-1, CIRCLE, given.shape[1]).roll(1, 1)
        model.get_output_embeddings().weight.copy_(following.reshape(given.shape))
        given.mul_(FAMILIES.get(family, 16.0))
    return model


def tiny_prompts(count: int) -> list[torch.Tensor]:
    """Return prompts, int64 [1, 100 to 400], of a few phrases in any order, with other tokens between."""
    draw = torch.Generator().manual_seed(49)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most, (1,), generator=draw))

    def phrase(least: int, most: int) -> torch.Tensor:
        return torch.randint(2, 2 + TOKENS, (number(least, most),), generator=draw)

    prompts = []
    for _ in range(count):
        phrases = [phrase(8, 24) for _ in range(4)]
        parts = [phrases[number(0, 4)] if number(0, 5) else phrase(1, 8) for _ in range(60)]
        prompts.append(torch.cat(parts)[None, : number(100, 401)])
    return prompts


def text_prompts(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """Return prompts, int64 [1, 130 to 390], of a passage and the beginning of the same one."""
    text = text_ids(tokenizer)
    starts = [at * (text.shape[1] - 400) // count for at in range(count)]
    sizes = [100 + at * 37 % 200 for at in range(count)]
    parts = [text[:, start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return [torch.cat([part, part[:, : 30 + part.shape[1] // 5]], 1) for part in parts]


def answers(sieve: Any, prompts: list[torch.Tensor], draft: str | None) -> tuple[list[list[int]], dict[str, int]]:
    """Return the tokens of each answer, and the sums of the counts of drafts."""
    tokens = list[list[int]]()
    total = {"passes": 0, "drafted": 0, "accepted": 0}
    for ids in prompts:
        result = sieve.generate(ids, draft=draft, **options())
        tokens.append(result.sequences[0, ids.shape[1] :].tolist())
        if result.stats.drafts is not None:
            total = {name: value + vars(result.stats.drafts)[name] for name, value in total.items()}
    return tokens, total


def options() -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}


def difference(sieve: Any, ids: torch.Tensor, plain: list[int], drafted: list[int]) -> dict[str, Any]:
    """Return the first position of two answers that differs, and how close the two tokens are without drafts."""
    at = next(at for at, (one, other) in enumerate(itertools.zip_longest(plain, drafted)) if one != other)
    if at >= min(len(plain), len(drafted)):
        return {"position": at, "logits_apart": None}
    found = sieve.generate(ids, output_logits=True, return_dict_in_generate=True, **options())
    logits = found.output.logits[at][0]
    return {"position": at, "logits_apart": float(logits[plain[at]] - logits[drafted[at]])}


def compared(model: Any, plan: str, prompts: list[torch.Tensor], draft: str) -> dict[str, Any]:
    """Return counts of a family under a plan."""
    began = time.perf_counter()
    ((name, parameters),) = split_specs(plan)
    with kvsieve.attach(model, plan_without_floor(name, **parameters)) as sieve:
        plain, _ = answers(sieve, prompts, None)
        drafted, counts = answers(sieve, prompts, draft)
        differences = [
            {"prompt": at, **difference(sieve, ids, one, other)}
            for at, (ids, one, other) in enumerate(zip(prompts, plain, drafted, strict=True))
            if one != other
        ]
    tokens = sum(map(len, plain))
    seconds = round(time.perf_counter() - began, 1)
    return {"prompts": len(prompts), "tokens": tokens, **counts, "differences": differences, "seconds": seconds}


def why_not(row: dict[str, Any]) -> str | None:
    """Return what is wrong with a row, None if nothing is."""
    if row["differences"]:
        return f"{len(row['differences'])} answers differ"
    if not 0 < row["accepted"] < row["drafted"]:
        return "drafts were not both accepted and refused"
    return None


def known_rows(file: Path) -> dict[str, Any]:
    """Return the rows of a result by family, plan and draft."""
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() else {}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--plans", default=";".join(PLANS), help="separated by semicolons")
    parser.add_argument("--prompts", type=int, default=200, help="of each family and plan (default: 200)")
    parser.add_argument("--draft", default="lookup:adapt=false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = known_rows(arguments.out)
    wrong = []
    for family in arguments.families.split(","):
        if family == "demo":
            model, tokenizer = kvsieve.models.load_demo(torch.float32)
            prompts = text_prompts(tokenizer, arguments.prompts)
        else:
            model = circling(family)
            prompts = tiny_prompts(arguments.prompts)
        for plan in arguments.plans.split(";"):
            key = f"{family}, {plan}, {arguments.draft}"
            if rows.get(key, {}).get("prompts") != arguments.prompts:
                row = compared(model, plan, prompts, arguments.draft)
                stamp = environment()
                place = {"family": family, "plan": plan, "draft": arguments.draft, "at": stamp["commit"]}
                # Another process may have families of its own.
                rows = {**known_rows(arguments.out), key: {**place, **row}}
                write_result(arguments.out, {"environment": stamp, "new_tokens": NEW_TOKENS, "rows": rows})
            row = rows[key]
            reason = why_not(row)
            wrong += [key] if reason else []
            counts = ", ".join(f"{row[name]} {name}" for name in ("prompts", "tokens", "drafted", "accepted"))
            print(f"{key}: {counts}, {row['seconds']} s: {reason or 'identical'}", flush=True)
    print(f"{len(wrong)} failed" if wrong else "all identical")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
