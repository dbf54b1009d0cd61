"""Tokens per second with drafts beside those without, in turns, on tasks whose answers copy from a long prompt or not.

    python benchmarks/speed/speculation.py MODEL [--lengths 4096,8192] [--tasks edit,quote,table,summary,free]
        [--drafts "lookup;self:snapkv:budget=10%"] [--plans "full;snapkv:budget=10%;kivi"] [--samples 20] [--out FILE]

The prompts are those of copying.py. A document is prefilled once per plan; every question about it continues a fork of
that cache, once without drafts and once with each draft, in another order for every question. Answers are greedy, those
of `free` sampled at a temperature of 0.8 with one seed. Seconds are those after the first token, and answers end where
the model ends them, or at --new-tokens. The result has every sample, and medians of the ratio of tokens per second to
those without drafts of the same sample. Samples that the result has are not measured again, so a run that was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from benchmarks.speed.copying import QUESTIONS, TASKS, documents
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.specs import split_specs
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

NONE = "none"
CHUNK = 1024
# Tokens at the end of a prompt that are prefilled per answer: observation windows look at them.
LAST = 128
# A small model's greedy stories repeat themselves.
GREEDY: dict[str, Any] = {"do_sample": False}
CHOICE: dict[str, dict[str, Any]] = {"free": {"do_sample": True, "temperature": 0.8, "top_p": 0.95}}
# Least ratio wanted of `lookup`.
WANTED = {"edit": 3.0, "quote": 3.0, "table": 3.0, "summary": 1.1, "free": 0.97}


def plan_named(text: str) -> kvsieve.Plan:
    ((name, parameters),) = split_specs(text)
    return plan_without_floor(name, **parameters)


def answer(sieve: Any, cache: Any, ids: torch.Tensor, draft: str, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """Return times and counts of an answer, and its tokens. cache: of the prompt's beginning; a fork is used."""
    torch.manual_seed(0)
    result = sieve.generate(ids, cache=cache.fork(), draft=None if draft == NONE else draft, **options)
    tokens = result.sequences[0, ids.shape[1] :].tolist()
    run = {"tokens": len(tokens), "s": round(sum(result.token_s), 4), "first_s": round(result.stats.ttft_s, 3)}
    decoding = result.stats.decoding
    if decoding.captures:
        run |= {"captures": decoding.captures, "capture_s": round(decoding.capture_s, 3)}
    counts = result.stats.drafts
    if counts is not None:
        run |= {"passes": counts.passes, "drafted": counts.drafted, "accepted": counts.accepted}
    return run, tokens


def shared(prompts: list[list[int]]) -> int:
    """Return how many first tokens all prompts share, short of the last ones of the shortest."""
    short = min(map(len, prompts))
    same = next((at for at in range(short) if len({each[at] for each in prompts}) > 1), short)
    return min(same, short - LAST)


class Run:
    """A run's settings, its result so far, and the file of it.

    Raises SystemExit if the file is of other settings.
    """

    def __init__(self, model: Any, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.drafts = [NONE, *arguments.drafts.split(";")]
        self.samples: list[dict[str, Any]] = []
        name = Path(arguments.model).name if arguments.model else "demo"
        settings = {"model": name, "dtype": str(model.dtype).removeprefix("torch.")}
        self.report: dict[str, Any] = {**settings, "new_tokens": arguments.new_tokens, "environments": []}
        if arguments.out.exists():
            known = json.loads(arguments.out.read_text())
            if any(known[key] != value for key, value in self.report.items() if key != "environments"):
                raise SystemExit(f"error: {arguments.out} has other settings; name another file with --out")
            self.report = {key: known[key] for key in self.report}
            self.samples = known["samples"]
        self.report["environments"].append(environment(model))

    def lacks(self, **place: Any) -> bool:
        """Return True if a sample has not been measured with all drafts."""
        known = (each["runs"] for each in self.samples if place.items() <= each.items())
        return not any(runs.keys() >= set(self.drafts) for runs in known)

    def add(self, place: dict[str, Any], runs: dict[str, Any]) -> None:
        """Take in a sample, in place of an earlier one, and write the file."""
        self.samples = [each for each in self.samples if not place.items() <= each.items()]
        self.samples.append({**place, "runs": runs})
        write_result(self.arguments.out, {**self.report, "summary": summary(self.samples), "samples": self.samples})

    def document(self, sieve: Any, tokenizer: Any, text: Any, place: dict[str, Any], number: int) -> None:
        """Measure what is missing of all questions about a document. number: of the document."""
        new_tokens = self.arguments.new_tokens
        prompts = {
            (task, number * QUESTIONS + at): ids
            for task in text.questions
            if task in self.arguments.tasks.split(",")
            for at, ids in enumerate(text.prompts(tokenizer, task))
            if number * QUESTIONS + at < self.arguments.samples
        }
        missing = [key for key in prompts if self.lacks(**place, task=key[0], sample=key[1])]
        if not missing:
            return
        size = shared(list(prompts.values()))
        device = sieve.model.device
        first = torch.tensor([prompts[missing[0]]], device=device)
        cache = sieve.begin(first[:, :size], chunk=CHUNK)
        for draft in self.drafts:
            # Makes kernels and buffers.
            answer(sieve, cache, first, draft, max_new_tokens=12, do_sample=False)
        for turn, (task, sample) in enumerate(missing):
            ids = torch.tensor([prompts[task, sample]], device=device)
            runs: dict[str, Any] = {}
            tokens: dict[str, list[int]] = {}
            order = self.drafts[turn % len(self.drafts) :] + self.drafts[: turn % len(self.drafts)]
            for draft in order:
                options = {"max_new_tokens": new_tokens, **CHOICE.get(task, GREEDY)}
                runs[draft], tokens[draft] = answer(sieve, cache, ids, draft, **options)
            for draft in self.drafts[1:]:
                runs[draft]["same"] = tokens[draft] == tokens[NONE]
            self.add({**place, "task": task, "sample": sample}, runs)
            print(json.dumps(self.samples[-1]), flush=True)
            if self.arguments.show:
                print(tokenizer.decode(tokens[NONE]), flush=True)


def rate(run: dict[str, Any]) -> float:
    """Return tokens per second after the first."""
    return float((run["tokens"] - 1) / run["s"])


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per plan, length, task and draft; answers of one token, which have no rate, do not count."""
    by: dict[tuple[Any, ...], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for each in samples:
        base = each["runs"][NONE]
        for draft, run in each["runs"].items():
            if draft != NONE and min(base["tokens"], run["tokens"]) > 1:
                place = each["plan"], each["length"], each["task"], draft
                by.setdefault(place, []).append((base, run))
    names = ("plan", "length", "task", "draft")
    return [{**dict(zip(names, place, strict=True)), **_summed(by[place])} for place in sorted(by)]


def _summed(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    ratios = [rate(run) / rate(base) for base, run in pairs]
    runs = [run for _, run in pairs]
    total = {key: sum(run[key] for run in runs) for key in ("tokens", "passes", "drafted", "accepted")}
    return {
        "samples": len(pairs),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "tokens_per_s": round(statistics.median(map(rate, runs)), 1),
        "tokens_per_s_without": round(statistics.median(rate(base) for base, _ in pairs), 1),
        "tokens": round(statistics.median(run["tokens"] for run in runs)),
        "tokens_per_pass": round(1 + total["accepted"] / max(total["passes"], 1), 2),
        "accepted": round(total["accepted"] / max(total["drafted"], 1), 3),
        "same": sum(run["same"] for run in runs),
    }


def places(arguments: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Yield plans, lengths and kinds of documents."""
    for plan in arguments.plans.split(";"):
        for length in map(int, arguments.lengths.split(",")):
            for kind, tasks in TASKS.items():
                if set(tasks) & set(arguments.tasks.split(",")):
                    yield plan, length, kind


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a directory or hub id (default: the demo model)")
    parser.add_argument("--lengths", default="4096,8192", help="tokens of prompt and answer")
    parser.add_argument("--tasks", default=",".join(WANTED))
    parser.add_argument("--drafts", default="lookup", help="separated by semicolons")
    parser.add_argument("--plans", default="full", help="separated by semicolons")
    parser.add_argument("--samples", type=int, default=20, help="of each task, length and plan (default: 20)")
    parser.add_argument("--new-tokens", type=int, default=192, help="most tokens of an answer (default: 192)")
    parser.add_argument("--show", action="store_true", help="print answers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "drafts_speed.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.tasks.split(",")) - WANTED.keys():
        parser.error(f"--tasks are of {', '.join(WANTED)}; got {', '.join(sorted(unknown))}")
    model, tokenizer = kvsieve.models.load(arguments.model)
    run = Run(model, arguments)
    count = -(-arguments.samples // QUESTIONS)
    for plan, length, kind in places(arguments):
        with kvsieve.attach(model, plan_named(plan), tokenizer=tokenizer) as sieve:
            for number, text in enumerate(documents(kind, tokenizer, length - arguments.new_tokens, count)):
                run.document(sieve, tokenizer, text, {"plan": plan, "length": length}, number)
    rows = summary(run.samples)
    for row in rows:
        row["wanted"] = WANTED[row["task"]] if row["draft"] == "lookup" else ""
    print(markdown_table([*rows[0]], [list(map(str, row.values())) for row in rows]))


if __name__ == "__main__":
    main()
