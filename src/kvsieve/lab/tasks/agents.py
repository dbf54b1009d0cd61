"""An agent's transcript of many turns: the current value of a record, and a fact of an earlier turn."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import passage
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Score
from kvsieve.lab.tasks.words import NOUNS, TOWNS, numbers

_TURNS = 20
_THINGS = 3
_FOLDERS = "docs lib notes reports setup tools".split()


@dataclass(frozen=True)
class Agents(Generated):
    """Turns of an action and its observation: pages of text, counts that change, and one ticket number.

    turns: in the transcript.
    """

    name: str = "agents"
    title: str = "Agent's transcript (20 turns)"
    turns: int = _TURNS

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        things = rng.sample(NOUNS, _THINGS)
        town = rng.choice(TOWNS)
        (ticket,) = numbers(rng, 1)
        at = rng.randrange(1, self.turns // 2)
        # Every count is another number, so that an old one is no right answer.
        counts = iter(rng.sample(range(100, 1000), self.turns))
        stock: dict[str, int] = {}
        updates = []
        for turn in range(self.turns):
            thing = things[turn % _THINGS] if turn < _THINGS else rng.choice(things)
            stock[thing] = next(counts)
            updates.append(f"Stock of {thing}: {stock[thing]}.")
        files = [f"{rng.choice(_FOLDERS)}/{noun}.txt" for noun in rng.sample(NOUNS, self.turns)]
        starts = [rng.random() for _ in range(self.turns)]
        subject = rng.choice(things)
        ask = (
            f"What is the stock of {subject} after the last turn, and what is the ticket number of the repair in "
            f"{town}? Answer with both."
        )
        lead = f"The stock of {subject} is"
        answers = str(stock[subject]), ticket
        golden = f"{stock[subject]}. The ticket number is {ticket}."
        turn_asked = QuestionAnswer(ask, answers, state_and_fact(*answers), 40, prefix=lead, golden=golden)

        def make(words: int) -> Sample:
            parts = ["This is the record of an agent at work: its actions, and what it observed after each."]
            for turn in range(self.turns):
                share = words // self.turns + (turn < words % self.turns)
                read = "".join(passage(self.text, starts[turn], share)).strip()
                facts = [updates[turn]]
                if turn == at:
                    facts.append(f"The repair in {town} has the ticket number {ticket}.")
                seen = "\n".join([part for part in (read, *facts) if part])
                parts.append(f"Turn {turn + 1}\nAction: read {files[turn]}\nObservation: {seen}")
            return Sample("\n\n".join(parts), (turn_asked,), meta={"depth": at / (self.turns - 1)})

        return fit(make, count, length, self.name)[0]


def state_and_fact(state: str, fact: str) -> Score:
    """Score an answer: "state" is 1 if its first number is the current count, "fact" if it has the number of the fact.

    The score is their mean.
    """

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        found = re.findall(r"\d+", answer)
        current, known = float(found[:1] == [state]), float(fact in found)
        return {"score": (current + known) / 2, "state": current, "fact": known}

    return score
