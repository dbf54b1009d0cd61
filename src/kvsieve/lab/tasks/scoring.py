"""Scoring functions: (answer, expected) -> metrics in [0, 1]. "score" is the one that tables show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from kvsieve.lab.tasks.samples import Score


def match_all(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Share of the expected strings that occur in the answer, ignoring case (RULER, its "string match all")."""
    text = answer.lower()
    return {"score": sum(wanted.lower() in text for wanted in expected) / len(expected)}


def match_any(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if any of the expected strings occurs in the answer, ignoring case (RULER, its "string match part")."""
    text = answer.lower()
    return {"score": float(any(wanted.lower() in text for wanted in expected))}


def digits(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Compare a long number, digit by digit, with the answer's longest number.

    "partial", the score: the share of digits that are right at their place (after LagKV section 5); "exact": all are
    right; "first_digit": the first one is.
    """
    wanted = expected[0]
    got = max(re.findall(r"\d+", answer), key=len, default="")
    right = [digit == wanted_digit for digit, wanted_digit in zip(got, wanted, strict=False)]
    partial = sum(right) / len(wanted)
    return {
        "score": partial,
        "partial": partial,
        "exact": float(wanted in answer),
        "first_digit": float(bool(right) and right[0]),
    }


def first_word(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's first word is one of those expected, ignoring case and punctuation."""
    words = re.findall(r"\w+", answer.lower())
    return {"score": float(bool(words) and words[0] in {word.lower() for word in expected})}


def first_number(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the first whole number in the answer is the expected one."""
    found = re.search(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", answer))
    return {"score": float(found is not None and int(found.group()) == int(expected[0]))}


def repeated_choices(people: Sequence[str]) -> Score:
    """Score "name: choice" lines in two parts, the second headed "Part 2": each person's choice must be repeated.

    Names count as the model writes them. The score is the share of people with a unique choice, the same both times.
    "first_half" is the share with a unique choice in the first part, "second_half" the share of these who repeat it.
    """

    def chosen(part: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, choice in re.findall(r"^\W*(\w+) *: *(\w[\w -]*)", part, re.MULTILINE):
            if len(found) < len(people):
                found.setdefault(name, choice.strip().lower())
        return found

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        # The prompt gave the model the start of the first line.
        first, _, second = f"{people[0]}: {answer}".partition("Part 2")
        choices = chosen(first)
        again = chosen(second)
        often = Counter(choices.values())
        own = {name: choice for name, choice in choices.items() if often[choice] == 1}
        matches = sum(again.get(name) == choice for name, choice in own.items())
        return {
            "score": matches / len(people),
            "first_half": len(own) / len(people),
            "second_half": matches / max(len(own), 1),
        }

    return score


Check = Callable[[str], bool]


def instructions(checks: dict[str, Check]) -> Callable[[str, tuple[str, ...]], dict[str, float]]:
    """Return pass rates per instruction and their mean (IFEval's instruction level); "all" is its prompt level."""

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        passed = {name: float(check(answer)) for name, check in checks.items()}
        values = list(passed.values())
        return {"score": sum(values) / len(values), "all": float(all(values)), **passed}

    return score
