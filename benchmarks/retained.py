"""What methods keep of full KV's score: the table of docs/results.md and README.md, from results of `make retained`.

    python benchmarks/retained.py [RESULTS ...] [--tasks needle,ruler_vt]

Of the needle and RULER's single and multi-key needles, or of the tasks that are named: scores per task, the ratio of
the mean scores with the 95% interval of a bootstrap over prompts (over documents where several share one), the prompts
that full KV answers and a method does not, and the mean KL.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from kvsieve.eval.results import load
from kvsieve.report.tables import markdown_table

SINGLE, MULTI = "ruler_niah_single_", "ruler_niah_multikey_"
TASKS = ("needle", *(f"{kind}{number}" for kind in (SINGLE, MULTI) for number in (1, 2, 3)))
RESULTS = Path(__file__).parent / "results" / "qwen2.5-coder-0.5b" / "ruler"
DRAWS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, default=[RESULTS], help="runs of one model, one table of all")
    parser.add_argument("--tasks", default=",".join(TASKS))
    given = parser.parse_args()
    tasks = given.tasks.split(",")
    rows, documents = defaultdict(dict), {}
    for row in (row for folder in given.results for row in load(folder).samples):
        if row["task"] in tasks:
            rows[row["method"], row["budget"]][row["task"], row["sample"]] = row["score"], row["kl"]
            documents[row["task"], row["sample"]] = row["task"], row["meta"].get("document", row["sample"])
    full = rows["full", None]
    samples = sorted(key for key in full if all(key in mine for mine in rows.values()))
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents[key] for key in samples))}
    owner = np.array([numbers[documents[key]] for key in samples])
    drawn = np.random.default_rng(0).integers(len(numbers), size=(DRAWS, len(numbers)))
    theirs = np.array([full[key][0] for key in samples])
    out = []
    for (method, budget), mine in rows.items():
        scores = np.array([mine[key][0] for key in samples])
        ours, full_kv = (np.bincount(owner, each)[drawn].sum(1) for each in (scores, theirs))
        # Where prompts drawn may be such that full KV answers none of them, a ratio has no interval.
        interval = "[{:.0f}, {:.0f}]".format(*np.percentile(100 * ours / full_kv, [2.5, 97.5])) if full_kv.all() else ""
        each = [np.mean([mine[key][0] for key in samples if key[0] == task]) for task in tasks]
        lost = sum(their == 1 and our < 1 for their, our in zip(theirs, scores, strict=True))
        kept = f"{scores.mean() / theirs.mean():.0%} {interval}".rstrip()
        kl = np.mean([mine[key][1] for key in samples])
        cells = [f"{100 * score:.0f}" for score in each]
        out.append([method, budget or "all", *cells, kept, f"{lost} of {int((theirs == 1).sum())}", f"{kl:.3f}"])
    print(f"{len(samples)} prompts")
    print(markdown_table(["method", "budget", *tasks, "of full KV", "lost", "KL"], out))


if __name__ == "__main__":
    main()
