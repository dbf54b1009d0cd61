"""Instructions far from the question, which no other text points at: do they survive eviction?"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import passage
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import Check, instructions
from kvsieve.lab.tasks.words import FIRST_NAMES, TOWNS


@dataclass(frozen=True)
class Instructions(Generated):
    """Two instructions before a long text, for the answer to a question after it.

    where: "user", at the start of the message, or "system", in the system prompt.
    """

    where: str = "user"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        name = rng.choice(FIRST_NAMES)
        town = rng.choice(TOWNS)
        start = rng.random()
        rules = (
            f"Your name is {name}. You live in {town}. Always answer in one sentence that says your name and where you "
            "live."
        )
        checks: dict[str, Check] = {
            "name": lambda answer: name.lower() in answer.lower(),
            "town": lambda answer: town.lower() in answer.lower(),
        }
        turn = QuestionAnswer("What is your name, and where do you live?", (name, town), instructions(checks), 28)
        system = rules if self.where == "system" else None
        lead = "Here is a text to keep at hand." if system else f"{rules}\n\nHere is a text to keep at hand."

        def make(words: int) -> Sample:
            return Sample(f"{lead}\n\n{''.join(passage(self.text, start, words)).strip()}", (turn,), system=system)

        return fit(make, count, length, self.name)[0]
