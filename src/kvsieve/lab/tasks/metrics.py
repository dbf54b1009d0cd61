"""Scores of public benchmarks: (answer, expected) -> metrics, after their public definitions."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvsieve.errors import InputError
from kvsieve.lab.tasks.samples import Score


def contains(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer contains one of `expected`, letter by letter."""
    return {"score": float(any(text in answer for text in expected))}


def first_number(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the first number of the answer is the expected one."""
    got = re.search(r"-?\d+(?:\.\d+)?", answer)
    return {"score": float(got is not None and float(got.group()) == float(expected[0]))}


def choice_letter(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's letter is the expected one: after "answer is" or "option", else the first single letter."""
    announced = re.search(r"(?i:answer(?: is)?|option(?: is)?)\s*[:*(\s]*([A-D])\b", answer)
    alone = re.search(r"(?<![\w'])([B-D]|A(?!\s+[a-z]))(?![\w'])", answer)
    got = announced or alone
    return {"score": float(got is not None and got.group(1) == expected[0])}


def choice_letters(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's letters are exactly the expected ones; a quarter for some of them (L-Eval)."""
    got = set(
        re.sub(r"[^A-D]", "", " ".join(re.findall(r"(?<![\w'])[A-D](?:[,\s&]*(?:and )?[A-D])*(?![\w'])", answer)))
    )
    wanted = set(expected[0])
    return {"score": 1.0 if got == wanted else 0.25 if got and got < wanted else 0.0}


def named(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's first line names the expected text, ignoring case and spaces (L-Eval's exact match)."""
    line = next((text for text in answer.split("\n") if len(text) > 1), answer)
    return {"score": float(any(_bare(text) in _bare(line) for text in expected))}


def verdict(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the first of "true" and "false" in the answer is the expected one."""
    got = re.search(r"true|false", answer.lower())
    return {"score": float(got is not None and got.group() == expected[0].lower())}


def final_number(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the number after "the answer is", else the last one of the first paragraph, is the expected one."""
    stated = re.search(rf"(?i:the answer is)[^\d\n-]*({_NUMBER})", answer)
    found = stated.group(1) if stated else next(iter(reversed(re.findall(_NUMBER, answer.split("\n\n")[0]))), None)
    wanted = re.search(_NUMBER, expected[0])
    assert wanted is not None
    return {"score": float(found is not None and _value(found) == _value(wanted.group()))}


def says_last(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the expected text ends the answer, up to three words, or follows "the final output"."""
    wanted = _value_text(expected[0])
    got = _value_text(answer)
    most = len(wanted.split()) + 3
    words = got.split("the final output")[-1].split()[:most] if "the final output" in got else got.split()[-most:]
    return {"score": float(wanted.replace(" ", "").lower() in "".join(words).lower())}


def label_match(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer begins with the expected label; for a label such as (B), if it is the first one named."""
    label = expected[0].strip().lower()
    if re.fullmatch(r"\([a-z]\)", label):
        got = re.search(r"\([a-z]\)", answer.lower())
        return {"score": float(got is not None and got.group() == label)}
    return {"score": float(re.match(rf"\W*{re.escape(label)}(?!\w)", answer.lower()) is not None)}


def exact(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer has exactly the words of one of `expected`, ignoring case, articles and punctuation."""
    return {"score": float(any(_words(answer) == _words(text) for text in expected))}


def english_f1(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best word F1 over `expected`, ignoring articles and punctuation; `contains` is the authors' looser match."""
    best = max(_f1(_words(answer), _words(text)) for text in expected)
    return {"score": best, "contains": float(any(text.lower() in answer.lower() for text in expected))}


def chinese_f1(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best character F1 over `expected`, ignoring punctuation and spaces."""
    return {"score": max(_f1(_characters(answer), _characters(text)) for text in expected)}


def rouge_l(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best ROUGE-L F-measure over `expected`, lower case and without stemming, with its ROUGE-1 and ROUGE-2."""
    return _rouge("rougeL", answer, expected)


def rouge_lsum(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    return _rouge("rougeLsum", answer, expected)


def chinese_rouge_l(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best ROUGE-L F-measure over `expected`, on jieba's words."""
    return _rouge("rougeL", answer, expected, chinese=True)


def chinese_word_f1(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    return {"score": max(_f1(_chinese_words(answer), _chinese_words(text)) for text in expected)}


def code_similarity(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best edit similarity over `expected` of the answer's first line that is neither comment nor fence (LongBench)."""
    from rapidfuzz.fuzz import ratio

    lines = answer.lstrip("\n").split("\n")
    line = next((text for text in lines if not re.search(r"`|#|//", text)), "")
    return {"score": max(ratio(line, text) for text in expected) / 100}


def number_share(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Best share over `expected` of the answer's numbers that are its number (LongBench)."""
    numbers = re.findall(r"\d+", answer)
    wanted = [found.group() for text in expected if (found := re.search(r"\d+", text))]
    return {"score": max((numbers.count(number) / max(len(numbers), 1) for number in wanted), default=0.0)}


def first_integer(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's first run of digits is the first one expected, digit by digit."""
    got = re.search(r"\d+", answer)
    return {"score": float(got is not None and got.group() == expected[0])}


def last_integer(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's last word is the expected whole number."""
    words = re.sub(r"[\n.`'\":]", " ", answer).split()
    return {"score": float(bool(words) and words[-1] == expected[0])}


def leading_numbers(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """Share of the expected numbers in the answer, up to its first wrong one (InfiniteBench)."""
    got = re.findall(r"\d+", answer)
    right = next((i for i, number in enumerate(expected) if i >= len(got) or got[i] != number), len(expected))
    return {"score": right / len(expected)}


def whole_word(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if one of `expected` occurs in the answer as a word, ignoring case."""
    found = (re.search(rf"(?<!\w){re.escape(text)}(?!\w)", answer, re.IGNORECASE) for text in expected)
    return {"score": float(any(found))}


@functools.cache
def one_of(classes: tuple[str, ...]) -> Score:
    """Return a classification's score: 1 over the number of classes named, if the right one is among them (LongBench).

    A name that is only a part of the right one does not count.
    """

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        named = [name for name in classes if name in answer]
        shares = [1 / sum(other == name or other not in name for other in named) for name in expected if name in named]
        return {"score": max(shares, default=0.0)}

    return score


@functools.cache
def first_line(score: Score) -> Score:
    return lambda answer, expected: score(answer.lstrip("\n").split("\n")[0], expected)


def same_function(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    """1 if the answer's code is at least 0.8 similar to expected[0], and less similar to all others of `expected`.

    An approximation: similarity is difflib's ratio over words, where RepoQA parses the code and takes BLEU; the other
    functions of the row stand for all of the repository's.
    """
    block = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    code = (block.group(1) if block else answer).split()
    likeness = [difflib.SequenceMatcher(None, code, text.split(), autojunk=False).ratio() for text in expected]
    return {"score": float(likeness[0] >= 0.8 and likeness[0] == max(likeness)), "similarity": likeness[0]}


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def _characters(text: str) -> list[str]:
    return [character for character in text.lower() if character.isalnum()]


def _f1(got: list[str], wanted: list[str]) -> float:
    same = sum((Counter(got) & Counter(wanted)).values())
    return 2 * same / (len(got) + len(wanted)) if same else 0.0


def _rouge(kind: str, answer: str, expected: tuple[str, ...], chinese: bool = False) -> dict[str, float]:
    scorer = _scorer(kind, chinese)
    best = max((scorer.score(text, answer) for text in expected), key=lambda found: found[kind].fmeasure)
    found = {name: float(value.fmeasure) for name, value in best.items()}
    return {"score": found[kind], "rouge1": found["rouge1"], "rouge2": found["rouge2"]}


class _ChineseWords:
    """Tokenizer for the package rouge_score."""

    def tokenize(self, text: str) -> list[str]:
        return _chinese_words(text)


@functools.cache
def _scorer(kind: str, chinese: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", kind], tokenizer=_ChineseWords() if chinese else None)


def _chinese_words(text: str) -> list[str]:
    import jieba

    jieba.setLogLevel("WARNING")
    return [word for part in jieba.lcut(text.lower()) if (word := "".join(_characters(part)))]


_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _bare(text: str) -> str:
    return text.lower().replace(" ", "")


def _value_text(text: str) -> str:
    """Return printed values without layout: commas, quotes, backslashes and ".0"."""
    return re.sub(r"[,'\\\\]|\.0", "", " ".join(text.split()))


# Packages of the extra "benchmarks" by score.
_PACKAGES: dict[Score, tuple[str, ...]] = {
    rouge_l: ("rouge_score",),
    rouge_lsum: ("rouge_score",),
    chinese_rouge_l: ("jieba", "rouge_score"),
    chinese_word_f1: ("jieba",),
    code_similarity: ("rapidfuzz",),
}


def check_packages(task: str, scores: Iterable[Score]) -> None:
    """Raise InputError if a package that the scores of `task` need is not installed."""
    for package in sorted({package for score in scores for package in _PACKAGES.get(score, ())}):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"the score of {task} needs the package {package}, which is not installed; "
                "pip install 'kvsieve[benchmarks]'"
            )
