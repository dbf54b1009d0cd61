"""The 13 task types of RULER (arXiv 2404.06654), generated here with its needles, parameters and scores.

Differences from its data: instructions in our own words; the haystack's text for the essays; generated documents for
question answering instead of SQuAD and HotpotQA; a sample's length covers the whole prompt, chat template included,
without the tokens of the answer.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit, fit_padded
from kvsieve.lab.tasks.haystack import NOISE, hide, passage
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import match_all
from kvsieve.lab.tasks.words import numbers, uuids, word_keys

_PLACES = 40


def spread(rng: random.Random, count: int) -> list[float]:
    """Return `count` of 40 evenly spaced depths, in ascending order."""
    return sorted(place / (_PLACES - 1) for place in rng.sample(range(_PLACES), count))


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


@dataclass(frozen=True)
class Niah(Generated):
    """Needles: `keys` of them, each with `values` values, and `queries` of them requested.

    haystack: "noise", "text", or "needles" (nothing but distractors). key_kind: "words" or "uuids"; value_kind:
    "numbers" or "uuids".
    """

    haystack: str = "text"
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        total = max(self.keys, self.queries)
        keys = self._draw(rng, self.key_kind, total)
        values = self._draw(rng, self.value_kind, total * self.values)
        pairs = [
            (key, value) for i, key in enumerate(keys) for value in values[i * self.values : (i + 1) * self.values]
        ]
        indices = sorted(rng.sample(range(total), self.queries))
        answers = tuple(value for i in indices for value in values[i * self.values : (i + 1) * self.values])
        sentences = [self._needle(*pair) for pair in pairs]
        rng.shuffle(sentences)
        depths = spread(rng, len(sentences))
        start = rng.random()
        more = rng.getrandbits(32)
        turn = self._turn([keys[i] for i in indices], answers)
        noun = self._noun
        intro = f"Special magic {noun}s are hidden in the following text. Memorize them; you will be asked about them."
        meta = {"depth": sum(depths) / len(depths)}

        def text(words: list[str]) -> Sample:
            return Sample(f"{intro}\n\n{hide(words, sentences, depths)}", (turn,), meta=meta)

        if self.haystack != "needles":
            source = NOISE[0] if self.haystack == "noise" else self.text
            return fit(lambda n: text(passage(source, start, n)), count, length, self.name)[0]

        def distracted(pairs: int, filler: str) -> Sample:
            fresh = random.Random(more)
            drawn = zip(self._many(fresh, self.key_kind, pairs), self._many(fresh, self.value_kind, pairs), strict=True)
            lines = [self._needle(key, value) for key, value in drawn if key not in keys and value not in values]
            for sentence, depth in zip(sentences, depths, strict=True):
                lines.insert(round(depth * len(lines)), sentence)
            body = "\n".join([filler, *lines] if filler else lines)
            return Sample(f"{intro}\n\n{body}", (turn,), meta=meta)

        return fit_padded(distracted, count, length, self.name)

    @property
    def _noun(self) -> str:
        return {"numbers": "number", "uuids": "uuid"}[self.value_kind]

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self._noun}s for {key} is: {value}."

    def _turn(self, keys: list[str], answers: tuple[str, ...]) -> QuestionAnswer:
        per_value = 16 if self.value_kind == "numbers" else 48
        if len(answers) == 1:
            question = f"What is the special magic {self._noun} for {keys[0]} mentioned in the provided text?"
            prefix = f"The special magic {self._noun} for {keys[0]} mentioned in the provided text is"
        else:
            question = (
                f"What are all the special magic {self._noun}s for {_listed(keys)} mentioned in the provided text?"
            )
            prefix = f"The special magic {self._noun}s for {_listed(keys)} mentioned in the provided text are"
        return QuestionAnswer(question, answers, match_all, per_value * len(answers), prefix=prefix)

    def _draw(self, rng: random.Random, kind: str, count: int) -> list[str]:
        return {"words": word_keys, "numbers": numbers, "uuids": uuids}[kind](rng, count)

    def _many(self, rng: random.Random, kind: str, count: int) -> list[str]:
        """Draw like `_draw`, such that the first ones do not depend on how many follow."""
        if kind == "uuids":
            return uuids(rng, count)
        return [self._draw(rng, kind, 1)[0] for _ in range(count)]


@dataclass(frozen=True)
class VariableTracking(Generated):
    """One chain of assignments of `hops` hops in noise; the answer: all variables with its value."""

    hops: int = 4

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        def chain() -> tuple[list[str], str, list[str]]:
            names: list[str] = []
            while len(names) < self.hops + 1:
                name = "".join(chr(65 + rng.randrange(26)) for _ in range(5))
                names += [name] if name not in names else []
            value = str(rng.randrange(10**4, 10**5))
            lines = [f"VAR {names[0]} = {value}."]
            lines += [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(names)]
            return names, value, lines

        def ask(value: str) -> str:
            return f"Find all variables that are assigned the value {value} in the text above."

        def answer(value: str) -> str:
            return f"The variables that are assigned the value {value} are"

        shown, shown_value, shown_lines = chain()
        example_text = hide(passage(NOISE[0], 0, 60), shown_lines, [i / self.hops for i in range(self.hops + 1)])
        example = f"Example. {example_text}\n{ask(shown_value)}\n{answer(shown_value)} {_listed(shown)}."
        names, value, lines = chain()
        depths = spread(rng, len(lines))
        turn = QuestionAnswer(ask(value), tuple(names), match_all, 48, prefix=answer(value))
        intro = "Memorize and track the chain of variable assignments hidden in the following text."

        def make(words: int) -> Sample:
            return Sample(f"{intro}\n\n{example}\n\n{hide(passage(NOISE[0], 0, words), lines, depths)}", (turn,))

        return fit(make, count, length, self.name)[0]


@dataclass(frozen=True)
class CommonWords(Generated):
    """A numbered list of words; the answer: the 10 that occur 30 times each, the others 3 times."""

    common: int = 10
    often: int = 30
    seldom: int = 3

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        question = f"What are the {self.common} most common words in the list above?"
        found = {word.lower() for word in re.findall(r"\b[A-Za-z]{4,9}\b", self.text)}
        vocabulary = sorted(found - set(re.findall(r"\w+", question.lower())))
        rng.shuffle(vocabulary)
        if len(vocabulary) < self.common + 20:
            vocabulary += word_keys(rng, 4000)
        words = vocabulary[: self.common]
        others = vocabulary[self.common :]
        order = rng.getrandbits(32)
        turn = QuestionAnswer(
            question,
            tuple(words),
            match_all,
            80,
            prefix=f"The {self.common} most common words are:",
        )

        def make(uncommon: int, filler: str) -> Sample:
            often = min(self.often, max(2 * self.seldom, uncommon))
            rest = [others[i] if i < len(others) else f"{others[i % len(others)]}{i}" for i in range(uncommon)]
            drawn = words * often + rest * self.seldom
            random.Random(order).shuffle(drawn)
            listed = " ".join(f"{i + 1}. {word}" for i, word in enumerate(drawn))
            intro = f"Below is a numbered list of words. Memorize the ones that appear most often. {filler}".strip()
            return Sample(f"{intro}\n\n{listed}", (turn,))

        return fit_padded(make, count, length, self.name)


@dataclass(frozen=True)
class FrequentWords(Generated):
    """Coded words with frequencies of a zeta distribution; the answer: the three most frequent."""

    alpha: float = 2.0
    vocabulary: int = 2000
    letters: int = 6

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        coded: list[str] = []
        while len(coded) < self.vocabulary:
            coded.append("".join(chr(97 + rng.randrange(26)) for _ in range(self.letters)))
        # As in RULER the most frequent "word" is noise.
        coded[0] = "..."
        weights = [1 / (rank + 1) ** self.alpha for rank in range(self.vocabulary)]
        total = sum(weights)
        order = rng.getrandbits(32)
        turn = QuestionAnswer(
            "Ignoring the dots, which three words appear most often in the coded text above? Give only the words.",
            tuple(coded[1:4]),
            match_all,
            40,
            prefix="The three words that appear most often are",
        )

        def make(size: int) -> Sample:
            drawn = [
                word for word, weight in zip(coded, weights, strict=True) for _ in range(int(size * weight / total))
            ]
            drawn += coded[:1] * (size - len(drawn))
            random.Random(order).shuffle(drawn)
            intro = "Read the following coded text and track how often each coded word appears."
            return Sample(f"{intro}\n\n{' '.join(drawn)}", (turn,))

        return fit(make, count, length, self.name)[0]
