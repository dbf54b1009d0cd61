"""Methods at a glance: scores at equal shares of full KV's entries, from benchmarks/answers/second_wave.py.

Samples are those that every method has; a method without nine tenths of them is named, and left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.answers.retained import ratio_interval
from benchmarks.evidence import RESULTS, described, provenance, rows
from benchmarks.toys.tables import markdown
from kvsieve.lab.eval.intervals import FEWEST_DIFFERENT, estimate
from kvsieve.lab.eval.rows import document

FOLDER = RESULTS / "qwen2.5-coder-0.5b" / "second_wave"
# Beside a folder: methods that came after its run, on fewer prompts.
LATER = "second_wave_later"
BASELINES = ("snapkv", "kvzip", "rocketkv", "random")
# Of the first grid; the second counts entries, on long answers.
SHARES = ("10%", "25%")
# The budget of methods that find theirs by a threshold.
OWN = "own"
# Mean score of full KV below which shares of it say nothing.
LEAST = 0.1
Setting = tuple[str, str | None]


@dataclass(frozen=True)
class Point:
    """A method at a budget: percent of full KV's score with its interval, entries stored and read, in percent.

    against: differences to a baseline at the same budget, in percent of full KV's score: mean, low, high.
    """

    share: float
    low: float
    high: float
    stored: float
    read: float | None
    against: dict[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Glance:
    """Points of one question mode and kind of budget, by method and budget."""

    question: str
    points: dict[tuple[str, str], Point]
    full: float
    prompts: int
    tasks: tuple[str, ...]
    left_out: tuple[str, ...]


@cache
def glances(folder: Path = FOLDER) -> list[Glance]:
    """Return what was measured: both question modes at shares, and long answers at numbers of entries."""
    found = [glance(rows(folder), question, True) for question in ("visible", "hidden")]
    found.append(glance(rows(folder), "visible", False))
    return [each for each in found if each is not None]


def glance(samples: list[dict[str, Any]], question: str, shares: bool) -> Glance | None:
    """Return the points of a question mode; None where nothing was measured."""
    by: dict[Setting, dict[Any, dict[str, Any]]] = defaultdict(dict)
    lengths = {row["length"] for row in samples if row["budget"] is not None and (row["budget"] in SHARES) == shares}
    for row in samples:
        suits = row["budget"] is None or (row["budget"] in SHARES) == shares
        if suits and row["question"] == question and row["length"] in lengths:
            by[row["method"], row["budget"]][row["task"], row["sample"]] = row
    full = by.pop(("full", None), {})
    if not by or not full:
        return None
    usual = median(len(set(mine) & set(full)) for mine in by.values())
    whole = {setting: mine for setting, mine in by.items() if len(set(mine) & set(full)) >= 0.9 * usual}
    keys = sorted(key for key in full if all(key in mine for mine in whole.values()))
    theirs = np.array([full[key]["score"] for key in keys])
    if not keys:
        return None
    if theirs.mean() < LEAST:
        return Glance(question, {}, 100 * theirs.mean(), len(keys), tuple(dict.fromkeys(key[0] for key in keys)), ())
    documents = [(key[0], document(full[key])) for key in keys]
    scores = {setting: np.array([mine[key]["score"] for key in keys]) for setting, mine in whole.items()}
    points = {}
    for (method, budget), mine in scores.items():
        against = {}
        for name in BASELINES:
            base = scores.get((name, budget))
            if base is not None and name != method:
                one = estimate(mine - base, documents)
                # Too few prompts differ for an interval that means something.
                sure = one.different >= FEWEST_DIFFERENT
                low, high = (one.low, one.high) if sure else (-1.0, 1.0)
                against[name] = tuple(100 * each / theirs.mean() for each in (one.mean, low, high))
        low, high = ratio_interval(mine, theirs, documents)
        kept = [whole[method, budget][key] for key in keys]
        reads = [row["kv_read_share"] for row in kept if row.get("kv_read_share") is not None]
        stored = 100 * mean(row["kv_share"] for row in kept)
        points[method, budget or OWN] = Point(
            100 * mine.mean() / theirs.mean(), low, high, stored, 100 * mean(reads) if reads else None, against
        )
    left_out = tuple(sorted({f"{method} at {budget}" for method, budget in by.keys() - whole.keys()}))
    tasks = tuple(dict.fromkeys(key[0] for key in keys))
    return Glance(question, points, 100 * theirs.mean(), len(keys), tasks, left_out)


def part(folder: Path = FOLDER) -> str:
    """Return the section of docs/methods.md; empty before anything was measured."""
    found = glances(folder)
    if not found:
        return ""
    machine = provenance([folder / "run.json"])[0]
    blocks = [
        "## At a glance",
        "![Score against the KV stored](pictures/glance.png)",
        f"{described('Qwen2.5-Coder-0.5B-Instruct')} on {machine} (`python -m benchmarks.answers.second_wave`): "
        "percent of full KV's score on the same prompts, with the 95% interval, at equal shares of entries. Readers "
        "store all entries and read the share.",
    ]
    blocks += _blocks(found)
    later = folder.with_name(LATER)
    if later.exists():
        machine = provenance([later / "run.json"])[0]
        blocks += [f"Methods that came later, beside `snapkv`, on {machine}:", *_blocks(glances(later))]
    return "\n\n".join(blocks)


def _blocks(found: list[Glance]) -> Iterator[str]:
    """Yield a title, a table and verdicts for each."""
    for one in found:
        if not one.points:
            tasks = ", ".join(f"`{task}`" for task in one.tasks)
            yield f"On {one.prompts} prompts of {tasks} full KV scores {one.full:.0f}%, too little to compare."
            continue
        title = f"Question {one.question}" if is_of_shares(one) else "Long answers, by entries"
        yield f"**{title}**, {one.prompts} prompts of {', '.join(f'`{task}`' for task in one.tasks)}:"
        yield table(one)
        yield from verdicts(one)


def is_of_shares(one: Glance) -> bool:
    return any(budget in SHARES for _, budget in one.points)


def _budgets(one: Glance) -> list[str]:
    """Return the budgets, the smallest first, those of thresholds last."""
    found = {budget for _, budget in one.points}
    return sorted(found - {OWN}, key=lambda text: float(text.rstrip("%"))) + sorted(found & {OWN})


def table(one: Glance) -> str:
    """Return the points as a table, the best at the last budget first."""
    budgets = _budgets(one)
    names = {method for method, _ in one.points}
    best = {name: max(one.points[name, each].share for each in budgets if (name, each) in one.points) for name in names}
    # The budgets of long answers are entries at any time, of prompts that they hold.
    stored = budgets if is_of_shares(one) else []
    lines = [["`full`, score", *(f"{one.full:.0f}" for _ in budgets), *("100%" for _ in stored)]]
    for name in sorted(names, key=lambda name: (-best[name], name)):
        found = [one.points.get((name, each)) for each in budgets]
        shares = ["" if each is None else f"{each.share:.0f} [{each.low:.0f}, {each.high:.0f}]" for each in found]
        kept = ["" if each is None else f"{each.stored:.0f}%" for each in found] if stored else []
        lines.append([f"`{name}`", *shares, *kept])
    return markdown(["method", *budgets, *(f"stored at {each}" for each in stored)], lines)


def verdicts(one: Glance) -> Iterator[str]:
    """Yield what pays and what does not: differences to SnapKV and to a random choice that are beyond chance."""
    budgets = _budgets(one)
    for base in ("snapkv", "random"):
        for words, sign in (("Above", 1), ("Below", -1)):
            sure = []
            for budget in budgets:
                names = [
                    f"`{method}`"
                    for (method, at), point in one.points.items()
                    if at == budget and base in point.against and sign * point.against[base][1 if sign > 0 else 2] > 0
                ]
                if names:
                    sure.append(f"at {budget} {', '.join(sorted(names))}")
            if sure:
                yield f"{words} `{base}` beyond chance: {'; '.join(sure)}."
    largest = [budget for budget in budgets if budget != OWN][-1]
    level = [
        f"`{method}`"
        for (method, at), point in one.points.items()
        if at == largest and "random" in point.against and point.against["random"][1] <= 0
    ]
    if level:
        yield f"No better than a random choice at {largest}, beyond chance: {', '.join(sorted(level))}."
    if one.left_out:
        yield f"Without enough prompts: {', '.join(one.left_out)}."
