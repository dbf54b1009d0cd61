"""A long answer with a second half that repeats the first; the score compares the two."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import noise_words
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import repeated_choices
from kvsieve.lab.tasks.words import FIRST_NAMES

_ANIMALS = "bear cat deer eagle fox goat horse ibis jackal koala lion otter".split()
_PEOPLE = 12
# Tokens of a line such as "Yusuf: rhinoceros", with some to spare.
_PER_LINE = 10


@dataclass(frozen=True)
class LongAnswer(Generated):
    """People are given one animal each, line by line, and all the lines are repeated."""

    name: str = "longanswer"
    title: str = "Long answer (own lines repeated)"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        names = rng.sample(FIRST_NAMES, _PEOPLE)
        animals = rng.sample(_ANIMALS, _PEOPLE)
        got = dict(zip(names, animals, strict=True))
        lists = f"People: {', '.join(names)}.\nAnimals: {', '.join(animals)}."
        ask = (
            "Part 1: give each person an animal, both in the order of the lists, one person per line.\nPart 2: repeat "
            f"each person's animal, one person per line, in this order: {', '.join(names)}."
        )
        start = f"Part 1:\n{names[0]}:"
        lines = "\n".join(f"{name}: {got[name]}" for name in names)
        golden = f"Part 1:\n{lines}\n\nPart 2:\n{lines}".removeprefix(start).strip()
        limit = _PER_LINE * (2 * _PEOPLE + 1)
        turn = QuestionAnswer(
            ask, tuple(animals), repeated_choices(names), limit, prefix=start, golden=golden, spread=True
        )

        def make(words: int) -> Sample:
            return Sample(f"{noise_words(words)}\n\n{lists}".strip(), (turn,))

        return fit(make, count, length, self.name)[0]
