"""SCBench's scores: (answer, expected) -> metrics, written after the benchmark's public definitions."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter


def contains(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when one of `expected` stands in the answer, letter by letter."""
    return {"score": float(any(each in answer for each in expected))}


def first_number(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when the first number of the answer is the expected one."""
    got = re.search(r"-?\d+(?:\.\d+)?", answer)
    return {"score": float(got is not None and float(got.group()) == float(expected[0]))}


def choice_letter(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when the answer's letter is the expected one: after "answer is" or "option", else the first on its own."""
    announced = re.search(r"(?i:answer(?: is)?|option(?: is)?)\s*[:*(\s]*([A-D])\b", answer)
    alone = re.search(r"(?<![\w'])([B-D]|A(?!\s+[a-z]))(?![\w'])", answer)
    got = announced or alone
    return {"score": float(got is not None and got.group(1) == expected[0])}


def label_match(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when the answer begins with the expected label; for a label such as (B), when it is the first one named."""
    label = expected[0].strip().lower()
    if re.fullmatch(r"\([a-z]\)", label):
        got = re.search(r"\([a-z]\)", answer.lower())
        return {"score": float(got is not None and got.group() == label)}
    return {"score": float(re.match(rf"\W*{re.escape(label)}(?!\w)", answer.lower()) is not None)}


def english_f1(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best word F1 over `expected`, articles and punctuation aside; `contains` is the looser match of the authors."""
    best = max(_f1(_words(answer), _words(each)) for each in expected)
    return {"score": best, "contains": float(any(each.lower() in answer.lower() for each in expected))}


def chinese_f1(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best character F1 over `expected`, punctuation and spaces aside."""
    return {"score": max(_f1(_characters(answer), _characters(each)) for each in expected)}


def rouge_l(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best ROUGE-L F-measure over `expected`: longest common subsequence of lower-case words, without stemming."""
    return {"score": max(_rouge_l(_tokens(answer), _tokens(each)) for each in expected)}


def same_function(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 when the answer's code is at least 0.8 like expected[0], and no other of `expected` is more alike.

    An approximation: likeness is difflib's ratio over words, where RepoQA parses the code and takes BLEU; the other
    functions asked for in the same row stand for all of the repository's.
    """
    block = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = (block.group(1) if block else answer).split()
    likeness = [difflib.SequenceMatcher(None, code, each.split(), autojunk=False).ratio() for each in expected]
    return {"score": float(likeness[0] >= 0.8 and likeness[0] == max(likeness)), "similarity": likeness[0]}


def _words(text: str) -> list[str]:
    bare = "".join(each for each in text.lower() if each not in string.punctuation)
    return [each for each in bare.split() if each not in ("a", "an", "the")]


def _characters(text: str) -> list[str]:
    return [each for each in text.lower() if each.isalnum()]


def _tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _f1(got: list[str], wanted: list[str]) -> float:
    same = sum((Counter(got) & Counter(wanted)).values())
    return 2 * same / (len(got) + len(wanted)) if same else 0.0


def _rouge_l(got: list[str], wanted: list[str]) -> float:
    row = [0] * (len(wanted) + 1)
    for word in got:
        diagonal = 0
        for column, other in enumerate(wanted, start=1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return 2 * row[-1] / (len(got) + len(wanted)) if row[-1] else 0.0
