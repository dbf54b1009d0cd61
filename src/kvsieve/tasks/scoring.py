"""Scoring functions: (answer, expected) -> metrics in [0, 1]. "score" is the one that tables show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from kvsieve.tasks.samples import Score


def match_all(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Share of the expected strings that occur in the answer, case ignored (RULER, its "string match all")."""
    text = answer.lower()
    return {"score": sum(each.lower() in text for each in expected) / len(expected)}


def match_any(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when any of the expected strings occurs in the answer, case ignored (RULER, its "string match part")."""
    text = answer.lower()
    return {"score": float(any(each.lower() in text for each in expected))}


def digits(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Score a long number by its digits, against the answer's longest number.

    The share of them that stand at their place ("partial", the score, after LagKV section 5), all of them right
    ("exact"), and the first one right ("first_digit").
    """
    wanted = expected[0]
    got = max(re.findall(r"\d+", answer), key=len, default="")
    right = [mine == theirs for mine, theirs in zip(got, wanted, strict=False)]
    partial = sum(right) / len(wanted)
    return {
        "score": partial,
        "partial": partial,
        "exact": float(wanted in answer),
        "first_digit": float(bool(right) and right[0]),
    }


def first_word(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when the answer's first word is one of those expected, case and punctuation ignored."""
    words = re.findall(r"\w+", answer.lower())
    return {"score": float(bool(words) and words[0] in {each.lower() for each in expected})}


def first_number(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when the first whole number in the answer is the one expected."""
    found = re.search(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", answer))
    return {"score": float(found is not None and int(found.group()) == int(expected[0]))}


def repeated_choices(people: Sequence[str]) -> Score:
    """Score "name: choice" lines in two parts, the second headed "Part 2": each person's choice must come again.

    Names count as the model writes them.

    The score is the share of people who have a choice of their own, the same both times. "first_half" is the share of
    those who have one of their own in the first part, "second_half" the share of these who have it again.
    """

    def chosen(part: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, choice in re.findall(r"^\W*(\w+) *: *(\w[\w -]*)", part, re.MULTILINE):
            if len(found) < len(people):
                found.setdefault(name, choice.strip().lower())
        return found

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        # The beginning of the first line was put into the model's mouth.
        first, _, second = f"{people[0]}: {answer}".partition("Part 2")
        choices, again = chosen(first), chosen(second)
        often = Counter(choices.values())
        own = {name: choice for name, choice in choices.items() if often[choice] == 1}
        kept = sum(again.get(name) == choice for name, choice in own.items())
        return {
            "score": kept / len(people),
            "first_half": len(own) / len(people),
            "second_half": kept / max(len(own), 1),
        }

    return score


Check = Callable[[str], bool]


def instructions(checks: dict[str, Check]) -> Callable[[str, tuple[str, ...]], dict[str, float]]:
    """Per-instruction pass rates and their mean (IFEval's instruction level); "all" is its prompt level."""

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        passed = {name: float(check(answer)) for name, check in checks.items()}
        values = list(passed.values())
        return {"score": sum(values) / len(values), "all": float(all(values)), **passed}

    return score
