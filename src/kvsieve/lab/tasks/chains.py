"""A ledger's entries in a long text, and an answer that adds them up line by line; every line is checked."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import hide, passage
from kvsieve.lab.tasks.ruler import spread
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Score

# Tokens of a line such as "Entry 12: 104 + 9 = 113", if every digit is one.
_PER_LINE = 24
_LINE = re.compile(r"Entry\s+(\d+)\W+(-?\d+)\s*([+-])\s*(\d+)\s*=\s*(-?\d+)")
_TOTAL = re.compile(r"Total\W+?(-?\d+)")


@dataclass(frozen=True)
class Chains(Generated):
    """Ledger entries of small numbers, in order, throughout a text; the answer has a line for each.

    steps: number of entries.
    """

    name: str = "chains"
    title: str = "Arithmetic chain (lines checked)"
    steps: int = 16

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        begin = rng.randrange(30, 100)
        amounts = drawn_amounts(rng, begin, self.steps)
        depths = spread(rng, self.steps)
        place = rng.random()
        verbs = {True: "adds", False: "takes away"}
        facts = [f"Entry {at} of the ledger {verbs[amount > 0]} {abs(amount)}." for at, amount in enumerate(amounts, 1)]
        ask = (
            f"The ledger begins with {begin}. Go through its entries 1 to {self.steps} in the text above, in order. "
            "Write a line for each with the sum so far, such as 'Entry 0: 12 + 5 = 17', and in the end a line such as "
            "'Total: 17'."
        )
        *lines, total = worked(begin, amounts)
        golden = "\n".join([*lines, total]).removeprefix("Entry 1:").strip()
        turn = QuestionAnswer(
            ask,
            (total.removeprefix("Total: "),),
            steps_and_total(begin, amounts),
            _PER_LINE * (self.steps + 1),
            prefix="Entry 1:",
            golden=golden,
            spread=True,
        )

        def make(words: int) -> Sample:
            return Sample(hide(passage(self.text, place, words), facts, depths), (turn,))

        return fit(make, count, length, self.name)[0]


def drawn_amounts(rng: random.Random, begin: int, steps: int) -> list[int]:
    """Return amounts of one digit that never bring the sum below 10."""
    amounts: list[int] = []
    for _ in range(steps):
        amount = rng.randrange(2, 10)
        amounts.append(-amount if rng.random() < 0.4 and begin + sum(amounts) - amount >= 10 else amount)
    return amounts


def worked(begin: int, amounts: Sequence[int]) -> list[str]:
    """Return the right lines, the total last."""
    lines = []
    for at, amount in enumerate(amounts, 1):
        lines.append(f"Entry {at}: {begin} {'+' if amount > 0 else '-'} {abs(amount)} = {begin + amount}")
        begin += amount
    return [*lines, f"Total: {begin}"]


def steps_and_total(begin: int, amounts: Sequence[int]) -> Score:
    """Score lines "Entry 3: 40 + 7 = 47" and the total, for a ledger that begins with `begin`.

    "steps" is the share of entries with a right line: the entry's own amount, added to the result of the line before
    as the answer has it. "total" is 1 if the last line is the ledger's sum. The score is their mean.
    """

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        # The prompt gave the model the start of the first line.
        text = answer if answer.lstrip().startswith("Entry") else f"Entry 1: {answer}"
        found: dict[int, tuple[int, int, int]] = {}
        for at, left, sign, amount, result in _LINE.findall(text):
            found.setdefault(int(at), (int(left), int(f"{sign}{amount}"), int(result)))
        right = 0
        before: int | None = begin
        for at, amount in enumerate(amounts, 1):
            line = found.get(at)
            right += line is not None and before is not None and line == (before, amount, before + amount)
            before = None if line is None else line[2]
        totals = _TOTAL.findall(text)
        steps = right / len(amounts)
        total = float(bool(totals) and int(totals[-1]) == begin + sum(amounts))
        return {"score": (steps + total) / 2, "steps": steps, "total": total}

    return score
