"""Questions about joined documents: score, divergence from full reading, and time to the first token, by kind of join.

    python benchmarks/answers/joins.py [MODEL] [--data LEVAL] [--sets natural,generated]
        [--kinds "none:share=20%;modules;ape;link:tokens=32;blend:share=5%;blend:share=10%;blend:share=20%;
            prophet:share=10%;prophet:share=20%;prophet:share=13%:shift=true;relevant:documents=2;relevant:documents=3;
            link:tokens=32:shift=true"]
        [--compressed "kvzip:budget=25%"] [--compressed-kinds "link:tokens=32"]
        [--documents 4] [--questions 2] [--minutes M] [--out FILE]

The questions are those of document_sets.py, 20 documents each. Every document is prefilled alone before, into a store
in memory, so a join finds all of them. Full reading (`full`) prefills the whole prompt. `none:share=20%` prefills the
first documents only, as many as have that share of the tokens. Kinds take turns with full reading, in another order
for every question; seconds are those of the join and of the question, to the first token. Divergence (KL) is that
of the distributions at each token of full reading's greedy answer; scores are those of each kind's own greedy answer:
word F1 for natural questions, else 1 if the answer names what was asked.

Kinds that the result has of a question are not run again; those added later are compared with another full reading.
With --compressed the documents are stored under a plan that compresses them without a question. --data is the folder of
L-Eval's files; without it the natural questions are left out. Results go to benchmarks/results/joins.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from benchmarks.answers.compared import (
    Deadline,
    Prefilled,
    Rows,
    along,
    distance,
    ends_of,
    greedy,
    plan_named,
    prefilled,
)
from benchmarks.answers.document_sets import DocumentSet, Pieces, generated, natural, pieces
from kvsieve.detokenize import text_of
from kvsieve.lab.tasks.samples import QuestionAnswer
from kvsieve.planning.specs import split_specs
from kvsieve.report.tables import markdown_table
from kvsieve.store import PrefixStore

KINDS = (
    "none:share=20%;modules;ape;link:tokens=32;blend:share=5%;blend:share=10%;blend:share=20%;"
    "prophet:share=10%;prophet:share=20%;prophet:share=13%:shift=true;relevant:documents=2;relevant:documents=3;"
    "link:tokens=32:shift=true"
)
WANTED = {"of_full": 0.95, "ratio": 0.25}
FULL = "full"
MEMORY = "4GiB"


def first_documents(prompt: Pieces, share: float) -> torch.Tensor:
    """Return the tokens of a prompt with the first documents that have at most this share of all their tokens."""
    sizes = [each.shape[1] for each in prompt.documents]
    ends = itertools.accumulate(sizes)
    count = sum(end <= share * sum(sizes) for end in ends)
    return torch.cat([prompt.before, *prompt.documents[: max(count, 1)], prompt.question], 1)


def begin(sieve: Any, prompt: Pieces, kind: str, store: PrefixStore) -> tuple[Prefilled, dict[str, Any]]:
    """Return a prompt prefilled by a kind of join, and counts of tokens."""
    ((name, options),) = split_specs(kind)
    if name in (FULL, "none"):
        ids = prompt.ids if name == FULL else first_documents(prompt, float(options["share"].rstrip("%")) / 100)
        return prefilled(sieve, ids), {"tokens": ids.shape[1], "prefilled": ids.shape[1], "missing": 0}
    began = time.perf_counter()
    joined = sieve.join(prompt.documents, before=prompt.before, kind=kind, question=prompt.question, store=store)
    seconds = time.perf_counter() - began
    ids = torch.cat([joined.ids, prompt.question], 1)
    again = joined.reread + prompt.question.shape[1]
    counts = {"tokens": ids.shape[1], "prefilled": again, "missing": joined.prefilled, "join_s": round(seconds, 4)}
    return prefilled(sieve, ids, joined.cache, seconds), counts


class Question:
    """One question, answered by full reading first of all. tokens, reference: full reading's answer."""

    def __init__(self, prompt: Pieces, turn: QuestionAnswer, tokenizer: Any, ends: list[int]) -> None:
        self.prompt = prompt
        self.turn = turn
        self.tokenizer = tokenizer
        self.ends = ends
        self.tokens: list[int] = []
        self.reference = torch.empty(0)

    def rows(self, sieve: Any, kinds: list[str], number: int, store: PrefixStore) -> Iterator[dict[str, Any]]:
        """Yield a row per kind; all begin in another order for every number."""
        at = number % len(kinds)
        begun = {kind: begin(sieve, self.prompt, kind, store) for kind in kinds[at:] + kinds[:at]}
        for kind in kinds:
            state, counts = begun.pop(kind)
            compared = {"kl": 0.0, "kl_first": 0.0} if kind == FULL else distance(*self._distributions(sieve, state))
            tokens, reference = greedy(sieve, state, self.turn.max_new_tokens, self.ends)
            if kind == FULL:
                self.tokens, self.reference = tokens, reference
            used = [token for token in tokens if token not in self.ends]
            text = text_of(self.tokenizer, used).strip()
            yield {
                "kind": kind,
                **counts,
                "seconds": round(state.seconds, 4),
                "score": round(self.turn.score(text, self.turn.answers)["score"], 4),
                "same": tokens == self.tokens,
                **compared,
                "text": text,
            }

    def _distributions(self, sieve: Any, state: Prefilled) -> tuple[torch.Tensor, torch.Tensor]:
        return self.reference, along(sieve, state, self.tokens)


class Run:
    """A run over sets of documents: its model, options and result."""

    def __init__(self, model: Any, tokenizer: Any, options: argparse.Namespace, known: Rows) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.known = known
        self.plans = {FULL: [FULL, *options.kinds.split(";")]}
        if options.compressed:
            self.plans[options.compressed] = options.compressed_kinds.split(";")
        self.ends = ends_of(model, tokenizer)
        self.deadline = Deadline(options.minutes)

    def missing(self, place: dict[str, Any]) -> dict[str, list[str]]:
        """Return the kinds by plan that the result lacks of a question; full reading, too, unless it has all."""
        found = {
            plan: [kind for kind in kinds if not self.known.of(**place, plan=plan, kind=kind)]
            for plan, kinds in self.plans.items()
        }
        if any(found.values()):
            found[FULL] = list(dict.fromkeys([FULL, *found[FULL]]))
        return {plan: kinds for plan, kinds in found.items() if kinds}

    def documents(self, one: DocumentSet, number: int) -> None:
        """Answer the questions about a set of documents that the result lacks."""
        turns = list(enumerate(one.questions[: self.options.questions]))
        places = [{"set": one.name, "number": number, "question": at} for at, _ in turns]
        if not (missing := next(filter(None, map(self.missing, places)), None)):
            return
        with PrefixStore(memory=MEMORY) as store:
            self._read(one, missing, store)
            for place, (at, turn) in zip(places, turns, strict=True):
                if self.missing(place) and not self.deadline.passed:
                    self._ask(one, turn, place, number + at, store)

    def _read(self, one: DocumentSet, missing: dict[str, list[str]], store: PrefixStore) -> None:
        """Prefill the documents alone, into a store."""
        prompt = pieces(self.tokenizer, one.documents, one.questions[0].question)
        for plan, kinds in missing.items():
            with kvsieve.attach(self.model, plan_named(plan), tokenizer=self.tokenizer) as sieve:
                began = time.perf_counter()
                joined = sieve.join(prompt.documents, before=prompt.before, kind="modules", store=store)
                print(f"{one.name}, {plan}: {joined.prefilled} tokens alone in {time.perf_counter() - began:.1f} s")
                for kind in kinds:
                    # Makes kernels and buffers, and what a kind keeps of each document.
                    if kind != FULL:
                        begin(sieve, prompt, kind, store)

    def _ask(self, one: DocumentSet, turn: QuestionAnswer, place: dict[str, Any], number: int, store: Any) -> None:
        prompt = pieces(self.tokenizer, one.documents, turn.question)
        question = Question(prompt, turn, self.tokenizer, self.ends)
        rows: list[dict[str, Any]] = []
        for plan, kinds in self.missing(place).items():
            with kvsieve.attach(self.model, plan_named(plan), tokenizer=self.tokenizer) as sieve:
                rows += [{**place, "plan": plan, **row} for row in question.rows(sieve, kinds, number, store)]
        for row in rows:
            row["full_s"] = rows[0]["seconds"]
            print(
                f"{row['plan']} {row['kind']}: {row['seconds']:.2f} s, {row['score']}, KL {row['kl']:.3f}", flush=True
            )
            self.known.drop(**place, plan=row["plan"], kind=row["kind"])
        self.known.add(rows, summary)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per set, plan and kind."""
    by: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["set"], row["plan"], row["kind"]), []).append(row)
    full = {name: _mean(mine, "score") for (name, plan, kind), mine in by.items() if (plan, kind) == (FULL, FULL)}
    found = []
    for (name, plan, kind), mine in sorted(by.items(), key=lambda each: (each[0][0], each[0][1:] != (FULL, FULL))):
        score = _mean(mine, "score")
        found.append(
            {
                "set": name,
                "plan": plan,
                "kind": kind,
                "questions": len(mine),
                "tokens": round(statistics.median(row["tokens"] for row in mine)),
                "prefilled": round(statistics.median(row["prefilled"] / row["tokens"] for row in mine), 4),
                "score": round(score, 4),
                "of_full": round(score / full[name], 4) if full[name] else None,
                "kl": round(_mean(mine, "kl"), 4),
                "same": round(_mean(mine, "same"), 4),
                "ratio": round(statistics.median(row["seconds"] / row["full_s"] for row in mine), 4),
                "missing": max(row["missing"] for row in mine),
            }
        )
    return found


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(float(row[name]) for row in rows)


def sets(options: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[int, DocumentSet]]:
    """Yield the sets of documents with their numbers, those of both kinds in turns."""
    wanted = options.sets.split(",")
    articles = natural(options.data, tokenizer) if options.data and "natural" in wanted else iter(())
    for number, article in itertools.zip_longest(
        range(options.documents), itertools.islice(articles, options.documents)
    ):
        if article is not None:
            yield number, article
        if "generated" in wanted:
            yield number, generated(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a directory or hub id (default: the demo model)")
    parser.add_argument("--data", help="folder of L-Eval's files (default: none)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sets", default="natural,generated")
    parser.add_argument("--kinds", default=KINDS, help="separated by semicolons")
    parser.add_argument("--compressed", default="kvzip:budget=25%", help="plan of stored documents; empty for none")
    parser.add_argument("--compressed-kinds", default="link:tokens=32", help="separated by semicolons")
    parser.add_argument("--documents", type=int, default=4, help="sets of documents of each kind (default: 4)")
    parser.add_argument("--questions", type=int, default=2, help="most about a set of documents (default: 2)")
    parser.add_argument("--minutes", type=float, help="end of the run (default: none)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "joins.json")
    options = parser.parse_args()
    model, tokenizer = kvsieve.models.load(options.model, dtype=getattr(torch, options.dtype))
    name = Path(options.model).name if options.model else kvsieve.models.fetch.MODEL_NAME
    run = Run(model, tokenizer, options, Rows(options.out, {"model": name, "dtype": options.dtype}, model))
    for number, one in sets(options, tokenizer):
        if run.deadline.passed:
            break
        run.documents(one, number)
    if run.known.rows:
        table = summary(run.known.rows)
        print(markdown_table([*table[0]], [list(map(str, row.values())) for row in table]))
        print(f"wanted of the best kind: {WANTED}")


if __name__ == "__main__":
    main()
