"""What methods keep of full KV's score, from directories of `kvsieve eval` with one model's results.

    python benchmarks/answers/retained.py RESULTS ... [--tasks needle,ruler_vt]

Per method and budget: the ratio of the mean scores, the prompts that full KV answers and a method does not, the mean
KL, and the entries stored. The ratio's 95% interval is by `kvsieve.lab.eval.intervals`, over documents where several
prompts share one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve.lab.eval.intervals import FEWEST_DIFFERENT, estimate
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.rows import document
from kvsieve.report.tables import markdown_table

Row = dict[str, Any]


@dataclass(frozen=True)
class Retained:
    """One method at one budget over the prompts that all settings ran on.

    Attributes:
        score: mean score in percent.
        share: of full KV's mean score, in percent; low, high: its interval, None for full KV.
        lost: prompts that full KV answers in full and the method does not; of: those that full KV does.
        kl: mean, in nats.
        stored: KV entries kept, in percent.
    """

    score: float
    share: float
    low: float | None
    high: float | None
    lost: int
    of: int
    kl: float
    stored: float
    prompts: int

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.0f}, {self.high:.0f}]"
        return f"{self.share:.0f}%{interval}"


def retained(
    folders: Iterable[Path], tasks: Collection[str] = (), question: str | None = None, length: int | None = None
) -> dict[tuple[str, str | None], Retained]:
    """Results by method and budget; full KV's budget is None. tasks, question, length: all if left out."""
    rows: dict[tuple[str, str | None], dict[Any, Row]] = defaultdict(dict)
    for row in (row for folder in folders for row in load(folder).samples):
        here = question in (None, row["question"]) and length in (None, row["length"])
        if here and (not tasks or row["task"] in tasks):
            rows[row["method"], row["budget"]][row["task"], row["length"], row["sample"]] = row
    full = rows["full", None]
    samples = sorted(key for key in full if all(key in mine for mine in rows.values()))
    documents = [(key[0], document(full[key])) for key in samples]
    theirs = np.array([full[key]["score"] for key in samples])
    out = {}
    for setting, mine in rows.items():
        scores = np.array([mine[key]["score"] for key in samples])
        low, high = (None, None) if setting == ("full", None) else ratio_interval(scores, theirs, documents)
        out[setting] = Retained(
            score=100 * scores.mean(),
            share=100 * scores.mean() / theirs.mean(),
            low=low,
            high=high,
            lost=sum(their == 1 and our < 1 for their, our in zip(theirs, scores, strict=True)),
            of=int((theirs == 1).sum()),
            kl=float(np.mean([mine[key]["kl"] for key in samples])),
            stored=100 * float(np.mean([mine[key]["kv_share"] for key in samples])),
            prompts=len(samples),
        )
    return out


def ratio_interval(scores: np.ndarray, theirs: np.ndarray, documents: Sequence[Hashable]) -> tuple[float, float]:
    """Return the 95% interval of a ratio of two mean scores on the same prompts, in percent.

    It is the difference's over the other's mean where few prompts differ, else that of the ratio made linear.
    """
    ratio, centre = scores.mean() / theirs.mean(), 1.0
    found = estimate(scores - theirs, documents)
    if found.different >= FEWEST_DIFFERENT:
        found, centre = estimate(scores - ratio * theirs, documents, within=(-max(1.0, ratio), 1.0)), ratio
    low, high = (100 * (centre + each / theirs.mean()) for each in (found.low, found.high))
    return max(0.0, low), high


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="runs of one model, one table of all")
    parser.add_argument("--tasks", default="", help="all if left out")
    parser.add_argument("--question", choices=("visible", "hidden"))
    given = parser.parse_args()
    found = retained(given.results, [each for each in given.tasks.split(",") if each], given.question)
    print(f"{next(iter(found.values())).prompts} prompts")
    rows = [
        [method, budget or "all", str(each), f"{each.lost} of {each.of}", f"{each.kl:.3f}", f"{each.stored:.0f}%"]
        for (method, budget), each in found.items()
    ]
    print(markdown_table(["method", "budget", "of full KV", "lost", "KL", "entries stored"], rows))


if __name__ == "__main__":
    main()
