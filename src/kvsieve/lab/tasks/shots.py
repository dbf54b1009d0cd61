"""Tasks with contexts of examples: many-shot classification and arithmetic.

Studies of KV compression find that these suffer where retrieval does not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit_padded
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import first_number, first_word
from kvsieve.lab.tasks.words import FIRST_NAMES

_TOPICS = {
    "food": (
        ["soup", "bread", "pasta", "salad", "cake", "curry"],
        [
            "The {} needs a little more salt.",
            "We cooked {} for dinner.",
            "Her {} tasted wonderful.",
            "I ordered {} twice.",
        ],
    ),
    "sport": (
        ["match", "race", "final", "tournament", "game", "cup"],
        ["They won the {} in the last minute.", "The coach praised us after the {}.", "He scored twice in the {}."],
    ),
    "weather": (
        ["rain", "snow", "fog", "wind", "thunder", "hail"],
        ["Heavy {} is expected tonight.", "The {} stopped before noon.", "More {} will come from the north."],
    ),
    "music": (
        ["song", "concert", "melody", "album", "chorus", "symphony"],
        ["The {} was played by an orchestra.", "She sang the {} from memory.", "I listened to the {} on repeat."],
    ),
}
_INVENTED = ("dax", "wug", "zop", "fep", "lum", "kiv")
_THINGS = "apples stamps marbles books coins shells buttons pencils".split()


@dataclass(frozen=True)
class ManyShot(Generated):
    """Sentences about four topics with meaningless labels; the answer: the label of a new one."""

    name: str = "manyshot"
    title: str = "Many-shot classification"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        labels = dict(zip(_TOPICS, rng.sample(_INVENTED, len(_TOPICS)), strict=True))
        new_topic = rng.choice(list(_TOPICS))
        more = rng.getrandbits(32)
        sentence = _sentence(rng, new_topic)
        turn = QuestionAnswer(
            f"Sentence: {sentence}\nWhich label?", (labels[new_topic],), first_word, 6, prefix="Label:"
        )

        def make(shots: int, filler: str) -> Sample:
            fresh = random.Random(more)
            lines: list[str] = []
            while len(lines) < shots:
                topic = fresh.choice(list(_TOPICS))
                shown = _sentence(fresh, topic)
                if shown != sentence:
                    lines.append(f"Sentence: {shown}\nLabel: {labels[topic]}")
            intro = f"Learn from the examples which label belongs to a sentence. {filler}".strip()
            return Sample("\n\n".join([intro, *lines]), (turn,))

        return fit_padded(make, count, length, self.name)


def _sentence(rng: random.Random, topic: str) -> str:
    words, patterns = _TOPICS[topic]
    return rng.choice(patterns).format(rng.choice(words))


@dataclass(frozen=True)
class Arithmetic(Generated):
    """Worked sums in words, then a new one."""

    name: str = "arithmetic"
    title: str = "Many-shot arithmetic"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        more = rng.getrandbits(32)
        story, query, term, result = _sum(rng)
        turn = QuestionAnswer(f"{story} {query}", (str(result),), first_number, 8, prefix=f"{term} =")

        def make(shots: int, filler: str) -> Sample:
            fresh = random.Random(more)
            lines: list[str] = []
            while len(lines) < shots:
                shown, query, term, value = _sum(fresh)
                if shown != story:
                    lines.append(f"{shown} {query} {term} = {value}.")
            intro = f"Answer the question as the examples do. {filler}".strip()
            return Sample("\n".join([intro, *lines]), (turn,))

        return fit_padded(make, count, length, self.name)


def _sum(rng: random.Random) -> tuple[str, str, str, int]:
    name = rng.choice(FIRST_NAMES)
    thing = rng.choice(_THINGS)
    first = rng.randrange(2, 10)
    second = rng.randrange(1, 10)
    question = f"How many {thing} does {name} have now?"
    if second < first and rng.random() < 0.5:
        return f"{name} has {first} {thing} and gives away {second}.", question, f"{first} - {second}", first - second
    return f"{name} has {first} {thing} and gets {second} more.", question, f"{first} + {second}", first + second
