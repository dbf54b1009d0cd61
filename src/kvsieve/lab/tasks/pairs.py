"""Key-value retrieval, one question or several: after InfiniteBench's Retr.KV and SCBench (arXiv 2412.10319)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit, fit_padded
from kvsieve.lab.tasks.haystack import hide, passage
from kvsieve.lab.tasks.ruler import spread
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import match_all
from kvsieve.lab.tasks.words import numbers, word_keys


@dataclass(frozen=True)
class KeyValue(Generated):
    """A JSON object of word keys and seven-digit values, with a question for one value."""

    name: str = "kv"
    title: str = "Key-value retrieval"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        key = word_keys(rng, 1)[0]
        value = numbers(rng, 1)[0]
        depth = rng.random()
        more = rng.getrandbits(32)
        turn = QuestionAnswer(f'What is the value of the key "{key}"?', (value,), match_all, 20, prefix=f'"{key}": "')

        def make(pairs: int, filler: str) -> Sample:
            fresh = random.Random(more)
            drawn = ((word_keys(fresh, 1)[0], numbers(fresh, 1)[0]) for _ in range(pairs))
            lines = [f'"{other}": "{number}"' for other, number in drawn if other != key and number != value]
            lines.insert(round(depth * len(lines)), f'"{key}": "{value}"')
            intro = f"Extract the value of the key that is asked for from the JSON object below. {filler}".strip()
            return Sample(f"{intro}\n\n{{{', '.join(lines)}}}", (turn,), meta={"depth": depth})

        return fit_padded(make, count, length, self.name)


@dataclass(frozen=True)
class MultiQuestion(Generated):
    """Several facts in one text and a question for each: in one conversation, or on copies of the context."""

    independent: bool = False
    questions: int = 4

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        keys = word_keys(rng, self.questions)
        values = numbers(rng, len(keys))
        sentences = [
            f"The special magic number of the {key} is {value}." for key, value in zip(keys, values, strict=True)
        ]
        depths = spread(rng, len(keys))
        start = rng.random()
        order = rng.sample(range(len(keys)), len(keys))
        turns = tuple(
            QuestionAnswer(
                f"What is the special magic number of the {keys[i]} mentioned in the text above?",
                (values[i],),
                match_all,
                20,
                prefix=f"The special magic number of the {keys[i]} is",
            )
            for i in order
        )

        def make(words: int) -> Sample:
            context = hide(passage(self.text, start, words), sentences, depths)
            return Sample(context, turns, independent=self.independent, meta={"depths": [depths[i] for i in order]})

        return fit(make, count, length, self.name)[0]
