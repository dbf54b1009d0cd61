"""Functions to be written by specifications in a long text, scored by hidden tests in a process of its own."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import hide, passage
from kvsieve.lab.tasks.ruler import spread
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Score
from kvsieve.lab.tasks.sandbox import check_sandbox, results_of
from kvsieve.lab.tasks.words import NOUNS, word_keys

Step = Callable[[int, int], int]
# A step in words, in code, and what it does with a number.
_STEPS: tuple[tuple[str, str, Step], ...] = (
    ("multiplies it by {}", "x = x * {}", lambda x, n: x * n),
    ("adds {}", "x = x + {}", lambda x, n: x + n),
    ("subtracts {}", "x = x - {}", lambda x, n: x - n),
    ("takes the remainder of a division by {}", "x = x % {}", lambda x, n: x % n),
    ("takes the larger of it and {}", "x = max(x, {})", max),
    ("takes the smaller of it and {}", "x = min(x, {})", min),
)
Steps = list[tuple[tuple[str, str, Step], int]]
_FUNCTIONS = 6
_TESTS = tuple(range(-9, 60, 3))


@dataclass(frozen=True)
class CodeTests(Generated):
    """Specifications of several functions of three steps in a text; one of them is to be written."""

    name: str = "codetests"
    title: str = "Code by a specification (hidden tests)"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        check_sandbox(self.name)
        names = [f"{key.replace('-', '_')}_of" for key in word_keys(rng, _FUNCTIONS)]
        drawn = [_drawn(rng) for _ in names]
        depths = spread(rng, _FUNCTIONS)
        asked = rng.randrange(_FUNCTIONS)
        place = rng.random()
        owner = rng.choice(NOUNS)
        sentences = [
            f"The function `{name}(x)` of the {owner} project takes a whole number x: it first "
            f"{', then '.join(words.format(number) for (words, _, _), number in steps)}, and returns the result."
            for name, steps in zip(names, drawn, strict=True)
        ]
        name, steps = names[asked], drawn[asked]
        ask = (
            f"Write the Python function `{name}(x)` of the {owner} project by its description in the text above. "
            "Answer with the code only."
        )
        lines = [*(code.format(number) for (_, code, _), number in steps), "return x"]
        head = f"def {name}(x):"
        golden = "\n".join(f"    {line}" for line in lines)
        turn = QuestionAnswer(ask, (golden,), passed_tests(head, _results(steps)), 80, prefix=f"{head}\n")

        def make(words: int) -> Sample:
            return Sample(hide(passage(self.text, place, words), sentences, depths), (turn,))

        return fit(make, count, length, self.name)[0]


def _drawn(rng: random.Random) -> Steps:
    """Return three steps with results that differ between tests, and differ at some of them without any one step."""
    while True:
        steps = [(form, rng.randrange(2, 20)) for form in rng.sample(_STEPS, 3)]
        results = _results(steps)
        shorter = [_results(steps[:at] + steps[at + 1 :]) for at in range(len(steps))]
        changed = [sum(one != other for one, other in zip(results, found, strict=True)) for found in shorter]
        if len(set(results)) > len(_TESTS) // 3 and min(changed) >= len(_TESTS) // 4:
            return steps


def _results(steps: Steps) -> list[int]:
    return [functools.reduce(lambda x, step: step[0][2](x, step[1]), steps, x) for x in _TESTS]


def passed_tests(head: str, wanted: list[int]) -> Score:
    """Score the code of an answer by the share of tests at which the function returns the right number.

    "parsed" is 1 if the code compiles. A function that ignores its argument passes no test.
    """
    name = head.removeprefix("def ").partition("(")[0]

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        code = code_of(answer, head)
        try:
            compile(code, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return {"score": 0.0, "parsed": 0.0}
        got = results_of(code, name, [[x] for x in _TESTS])
        passed = sum(one == right and type(one) is int for one, right in zip(got, wanted, strict=True))
        constant = len(set(map(str, got))) == 1
        return {"score": 0.0 if constant else passed / len(_TESTS), "parsed": 1.0}

    return score


def code_of(answer: str, head: str) -> str:
    """Return the function of an answer: its block of code if it has one, or the body that follows `head`."""
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    whole = fenced[1] if fenced is not None and head in fenced[1] else answer
    if head in whole:
        return f"{head}\n{_body(whole.partition(head)[2])}"
    return f"{head}\n{_body(answer)}"


def _body(text: str) -> str:
    """Return the lines of a function's body: up to the first later one without indentation."""
    lines = text.partition("```")[0].strip("\n").split("\n")
    others = [re.match(r"\s*", line) for line in lines[1:]]
    indents = [found[0] for found in others if found is not None and found[0]]
    # Answers are stripped, of the first line's indentation too.
    if lines[0].strip() and not lines[0].startswith((" ", "\t")):
        lines[0] = min(indents, key=len, default="    ")[:4] + lines[0].strip()
    kept = lines[:1]
    for line in lines[1:]:
        if line.strip() and not line.startswith((" ", "\t")):
            break
        kept.append(line)
    return "\n".join(kept)
