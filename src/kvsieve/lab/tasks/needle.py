"""One fact in a long text: the needle grid, and a 64-digit number (LagKV, section 5)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import hide, passage
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import digits, match_all

DEPTHS = 11


class _Hidden(Generated):
    """A fact at depths 0, 10, ... 100%, in turn."""

    def fact(self, rng: random.Random) -> tuple[str, QuestionAnswer]:
        raise NotImplementedError

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        depth = index % DEPTHS / (DEPTHS - 1)
        start = rng.random()
        fact, turn = self.fact(rng)

        def make(words: int) -> Sample:
            return Sample(hide(passage(self.text, start, words), [fact], [depth]), (turn,), meta={"depth": depth})

        return fit(make, count, length, self.name)[0]


@dataclass(frozen=True)
class Needle(_Hidden):
    """A seven-digit number."""

    name: str = "needle"
    title: str = "Needle in a haystack"

    def fact(self, rng: random.Random) -> tuple[str, QuestionAnswer]:
        code = str(rng.randrange(10**6, 10**7))
        question = "What is the special magic number of the lighthouse mentioned in the text above?"
        return f"The special magic number of the lighthouse is {code}.", QuestionAnswer(
            question, (code,), match_all, 28
        )


@dataclass(frozen=True)
class PassKey(_Hidden):
    """A 64-digit number, given twice: long enough to show eviction."""

    name: str = "passkey64"
    title: str = "64-digit passkey"

    def fact(self, rng: random.Random) -> tuple[str, QuestionAnswer]:
        key = str(rng.randrange(1, 10)) + "".join(str(rng.randrange(10)) for _ in range(63))
        question = "What is the pass key mentioned in the text above?"
        turn = QuestionAnswer(question, (key,), digits, 80, prefix="The pass key is")
        return f"The pass key is {key}. Remember it: {key} is the pass key.", turn
