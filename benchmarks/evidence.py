"""The numbers of the pages, by model, from the committed results. Nothing is measured here."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from benchmarks.answers.retained import Retained, retained
from kvsieve.lab.eval.results import load
from kvsieve.report.environment import UNRECORDED, stamps

RESULTS = Path(__file__).parent / "results"
MODELS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "models.json").read_text())
LEVAL = ("leval_scientific_qa", "leval_topic_retrieval_longchat", "leval_natural_question")
Summary = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """A set of prompts and what methods keep of full KV's score on it.

    Attributes:
        title: for a column.
        folders: directories of its results.
        budgets: those shown.
        found: by method and budget.
    """

    title: str
    folders: tuple[Path, ...]
    budgets: tuple[str, ...]
    found: dict[tuple[str, str | None], Retained]

    @property
    def prompts(self) -> int:
        return next(iter(self.found.values())).prompts


@dataclass(frozen=True)
class Evidence:
    """What has been measured with one model; parts whose files are not there are empty."""

    name: str
    results: Path = RESULTS

    @property
    def folder(self) -> Path:
        return self.results / MODELS[self.name]["results"]

    def paper(self, study: str, part: str) -> Path:
        return self.results / "paper" / study / self.name / part

    @cached_property
    def sets(self) -> dict[str, Measured]:
        """Sets of prompts by a short name."""
        found: dict[str, Measured] = {}

        def add(
            name: str, title: str, folders: list[Path], budgets: tuple[str, ...] = ("10%", "25%"), **of: Any
        ) -> None:
            there = tuple(each for each in folders if any(_within(row, **of) for row in rows(each)))
            if there:
                found[name] = Measured(title, there, budgets, retained(there, **of))

        documents = sorted(self.folder.glob("leval*"))
        add("ruler", "RULER, 8K", [self.folder / "ruler"])
        add("ruler_16k", "RULER, 16K", [self.folder / "ruler_16k" / each for each in "ab"])
        add("documents", "documents", documents, tasks=LEVAL, question="visible")
        add("hidden", "documents, hidden", documents, tasks=LEVAL, question="hidden")
        folder = self.paper("lagkv", "ruler")
        for length in sorted({row["length"] for row in rows(folder)}):
            title = f"RULER, hidden, {length // 1024}K"
            add(f"ruler_hidden_{length}", title, [folder], ("25%", "50%"), length=length)
        return found

    def scores(self, study: str, part: str, metric: str = "score") -> dict[str, tuple[float, float, int]]:
        """Mean in percent, KV entries stored in percent, and samples, by label, at the part's main length."""
        by: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in rows(self.paper(study, part)):
            if row["length"] == self.main_length(study, part):
                by[row["label"]].append((row["metrics"].get(metric, row["score"]), row["kv_share"]))
        return {
            label: (*(100 * sum(each) / len(found) for each in zip(*found, strict=True)), len(found))
            for label, found in by.items()
        }

    def main_length(self, study: str, part: str) -> int:
        """The length with most samples, the shortest of several; 0 where nothing has run."""
        counts = Counter(row["length"] for row in rows(self.paper(study, part)))
        return max(counts, key=lambda length: (counts[length], -length), default=0)

    @cached_property
    def speeds(self) -> dict[int, dict[str, Any]]:
        """Reports of `kvsieve bench` by length: of those that have one, the one with most rounds and contenders."""
        found: dict[int, dict[str, Any]] = {}
        for file in sorted((self.results / "bench").glob("*.json")):
            report = json.loads(file.read_text())
            if report["model"] != self.name or report["batch"] != 1:
                continue
            for length, entry in report["lengths"].items():
                rank = report["rounds"], len(entry["summary"])
                if int(length) not in found or rank > found[int(length)]["rank"]:
                    found[int(length)] = {"rank": rank, "file": file, "report": report, "summary": entry["summary"]}
        return dict(sorted(found.items()))


def _within(row: dict[str, Any], tasks: Sequence[str] = (), question: str = "", length: int = 0) -> bool:
    same = row["question"] == (question or row["question"]) and row["length"] == (length or row["length"])
    return same and row["task"] in (tasks or [row["task"]])


@cache
def rows(folder: Path) -> list[dict[str, Any]]:
    """Samples of a directory; none where it has not run."""
    return load(folder).samples if (folder / "run.json").exists() else []


def evidence() -> list[Evidence]:
    """The models that anything was measured with."""
    found = [Evidence(name) for name in MODELS]
    return [each for each in found if each.sets or each.speeds or any(RESULTS.glob(f"paper/*/{each.name}"))]


def described(name: str) -> str:
    """A model and its weights in words."""
    model = MODELS[name]
    return f"{name} ({model['shape']}; 4-bit {model['quantization']} GGUF weights, dequantized to bfloat16)"


def provenance(files: list[Path]) -> list[str]:
    """Machine, kvsieve's versions, commits and weights of some results, each in words."""
    found = [each for file in files for each in stamps(json.loads(file.read_text()))]
    machines = dict.fromkeys(
        each["device"] if each["device"] != "cpu" else f"{each['processor']}, {each['cores']} cores" for each in found
    )
    commits = list(dict.fromkeys(str(each["commit"]) for each in found))
    weights = sorted({each["weights"] or UNRECORDED for each in found})
    return [
        "; ".join(machines),
        ", ".join(sorted({each["kvsieve"] for each in found})),
        commits[0] + (f" and {len(commits) - 1} more" if len(commits) > 1 else ""),
        "; ".join(f"{each.partition('sha256:')[2][:12]}…" if "sha256:" in each else each for each in weights),
    ]
