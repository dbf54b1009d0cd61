"""How often 95% intervals (`kvsieve.lab.eval.intervals`) hold, and verdicts are false, on synthetic samples.

    python benchmarks/answers/coverage.py [--draws 4000] [--out benchmarks/results/coverage.json]

Each row draws sets of 10, 20 and 50 samples (documents, where four questions are about each) whose true mean is known,
and counts the sets whose interval holds it. A verdict is false where the mean is 0 and it says "lower" or "higher",
and where the mean is -0.05 and it says "no worse" or "did not come out". The table goes to coverage.md beside the JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.paper.verdicts import MARGIN, OPEN, SCORES, Case, apart, no_worse
from kvsieve.lab.eval.intervals import MeanEstimate, estimate, share_interval
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

SIZES, QUESTIONS, SEED, TINY = (10, 20, 50), 4, 0, 1e-9
RESULTS = Path(__file__).parents[1] / "results" / "coverage.json"
Random = np.random.Generator
Draw = Callable[[Random, int], MeanEstimate]


@dataclass(frozen=True)
class Rule:
    """Samples of one kind, their true mean, and the interval they have. verdicts: whether one is printed."""

    kind: str
    rule: str
    mean: float
    draw: Draw
    verdicts: bool = True


def outcomes(random: Random, shape: tuple[int, ...], win: float, lose: float) -> np.ndarray:
    """Differences of two scores of 0 or 1: the shares of prompts that one setting alone has right."""
    return random.choice([1.0, -1.0, 0.0], shape, p=[win, lose, 1 - win - lose])


def pairs(win: float, lose: float) -> Draw:
    return lambda random, n: estimate(outcomes(random, (n,), win, lose))


def graded(mean: float, lose: float = 0.1) -> Draw:
    """Scores in quarters, as of a conversation: each right answer of four is lost, each wrong one won, by chance."""

    def draw(random: Random, n: int) -> MeanEstimate:
        theirs = random.binomial(4, 0.7, n)
        ours = random.binomial(theirs, 1 - lose) + random.binomial(4 - theirs, (mean + 0.7 * lose) / 0.3)
        return estimate((ours - theirs) / 4)

    return draw


def normal(mean: float) -> Draw:
    return lambda random, n: estimate(random.normal(mean, 0.3, n), within=None)


def skewed(random: Random, n: int) -> MeanEstimate:
    """Differences of two distances to full KV, which are log-normal."""
    return estimate(np.subtract(*random.lognormal(-0.5, 1.0, (2, n))), within=None)


def documents(win: float, lose: float, alike: float) -> Draw:
    """Questions of a document fare alike in a part of the documents, and each for itself in the others."""

    def draw(random: Random, n: int) -> MeanEstimate:
        each, one = outcomes(random, (n, QUESTIONS), win, lose), outcomes(random, (n, 1), win, lose)
        found = np.where(random.random((n, 1)) < alike, one, each)
        return estimate(found.ravel(), np.repeat(np.arange(n), QUESTIONS).tolist())

    return draw


def normal_documents(random: Random, n: int) -> MeanEstimate:
    found = random.normal(0, 0.3, (n, 1)) + random.normal(0, 0.3, (n, QUESTIONS))
    return estimate(found.ravel(), np.repeat(np.arange(n), QUESTIONS).tolist(), within=None)


def tasks(sizes: tuple[int, ...], rates: tuple[tuple[float, float], ...]) -> Draw:
    """Tasks with rates of their own, of n samples times `sizes`."""

    def draw(random: Random, n: int) -> MeanEstimate:
        found = [outcomes(random, (n * size,), *rate) for size, rate in zip(sizes, rates, strict=True)]
        names = [number for number, each in enumerate(found) for _ in each]
        return estimate(np.concatenate(found), tasks=names)

    return draw


def two_sets(random: Random, n: int) -> MeanEstimate:
    """Losses on n prompts of a hard task, and on 2n of easy ones."""
    hard, easy = outcomes(random, (n,), 0.0, 0.3), outcomes(random, (2 * n,), 0.1, 0.4)
    case = apart(hard.tolist(), easy.tolist(), SCORES)
    assert case is not None
    return case.found


def part(chance: float, interval: Callable[[int, int], tuple[float, float]]) -> Draw:
    def draw(random: Random, n: int) -> MeanEstimate:
        count = int(random.binomial(n, chance))
        return MeanEstimate(count / n, *interval(count, n), 1.0, n, n, count)

    return draw


SHARES = (0.5, 0.8, 0.95)
RATES = ((0.3, 0.3), (0.1, 0.1), (0.02, 0.02))
RULES = (
    Rule("normal", "t", 0.0, normal(0)),
    Rule("normal", "t", -MARGIN, normal(-MARGIN)),
    Rule("log-normal, difference", "t", 0.0, skewed),
    *(Rule(f"binary, {win:g} won, {lose:g} lost", "Tango", win - lose, pairs(win, lose))
      for win, lose in ((0.3, 0.3), (0.1, 0.1), (0.05, 0.05), (0.1, 0.15), (0.0, 0.05), (0.05, 0.3), (0.6, 0.05))),
    Rule("graded, a tenth lost", "t, Gaffke", 0.0, graded(0)),
    Rule("graded, a tenth lost", "t, Gaffke", -MARGIN, graded(-MARGIN)),
    Rule("graded, 2% lost", "t, Gaffke", 0.0, graded(0, 0.02)),
    Rule("graded, none won", "t, Gaffke", -MARGIN, graded(-MARGIN, MARGIN / 0.7)),
    Rule("normal, 4 questions each", "t over documents", 0.0, normal_documents),
    Rule("binary, 4 questions each, half alike", "t over documents, Gaffke", 0.0, documents(0.2, 0.2, 0.5)),
    Rule("binary, 4 questions each, all alike", "t over documents, Gaffke", 0.0, documents(0.2, 0.2, 1.0)),
    Rule("binary, 4 questions each, half alike", "t over documents, Gaffke", -MARGIN, documents(0.1, 0.15, 0.5)),
    Rule("binary, 3 tasks of n", "Tango", 0.0, tasks((1, 1, 1), RATES)),
    Rule("binary, 3 tasks of n, n and 2n", "t over tasks, Gaffke", 0.0, tasks((1, 1, 2), RATES)),
    Rule("binary, n against 2n of others", "t of both, MOVER", 0.0, two_sets),
    *(Rule(f"share, {each:g}", "Clopper and Pearson", each, part(each, share_interval), False) for each in SHARES),
)  # fmt: skip


def false(rule: Rule, found: MeanEstimate) -> bool:
    if abs(rule.mean) < TINY:
        return found.verdict in ("lower", "higher")
    return no_worse(Case(found)) != OPEN


def measured(rule: Rule, draws: int) -> dict[str, object]:
    """Return the shares of sets, in percent by their size."""
    judged = rule.verdicts and min(abs(rule.mean), abs(rule.mean + MARGIN)) < TINY
    held, wrong = {}, {}
    for n in SIZES:
        random = np.random.default_rng([SEED, n])
        found = [rule.draw(random, n) for _ in range(draws)]
        held[n] = percent([each.low - TINY <= rule.mean <= each.high + TINY for each in found])
        if judged:
            wrong[n] = percent([false(rule, each) for each in found])
    return {"kind": rule.kind, "rule": rule.rule, "mean": round(rule.mean, 4), "coverage": held, "false": wrong}


def percent(seen: list[bool]) -> float:
    return round(100 * sum(seen) / len(seen), 1)


def table(rows: list[dict]) -> str:
    head = ["samples", "interval", "true mean", *(f"held, n={n}" for n in SIZES), *(f"false, n={n}" for n in SIZES)]
    cells = [
        [row["kind"], row["rule"], f"{row['mean']:g}"]
        + [str(row[what].get(n, row[what].get(str(n), ""))) for what in ("coverage", "false") for n in SIZES]
        for row in rows
    ]
    return markdown_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = []
    for rule in RULES:
        rows.append(measured(rule, given.draws))
        print(rows[-1], flush=True)
    result = {"environment": environment(), "draws": given.draws, "seed": SEED, "rows": rows}
    write_result(given.out, result)
    intro = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    given.out.with_suffix(".md").write_text(
        f"# How often intervals hold and verdicts are false\n\nPercent of {given.draws} sets, by `python "
        f"benchmarks/answers/coverage.py`. {intro}\n\n{table(rows)}\n"
    )


if __name__ == "__main__":
    main()
