"""InfiniteBench (arXiv 2402.13718): its JSONL files, with its prompts for open models (MIT licence) and its scores."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError
from kvsieve.lab.tasks.document_task import DocumentQuestion, DocumentTask, keep_ends
from kvsieve.lab.tasks.files import SUFFIXES, FileRow, find_file, read_rows
from kvsieve.lab.tasks.metrics import (
    check_packages,
    chinese_f1,
    choice_letter,
    english_f1,
    first_integer,
    first_number,
    last_integer,
    leading_numbers,
    rouge_lsum,
    whole_word,
)
from kvsieve.lab.tasks.samples import QuestionAnswer, Score
from kvsieve.planning.suggestions import did_you_mean


@dataclass(frozen=True)
class _Part:
    """One of InfiniteBench's tasks.

    Attributes:
        prompt: {context}, {input}, {options}, and the words of the input that `_filled` extracts.
        prefix: start of the answer, as the prompt's last words suggest.
        score: compares the answer with the label.
        max_new_tokens: longest answer.
    """

    prompt: str
    prefix: str
    score: Score
    max_new_tokens: int


_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
_QUIZ = "I will quiz you about the important information there.\n\n{context}\n\n{input}"
_PARTS = {
    "passkey": _Part(f"{_HIDDEN} and memorize them. {_QUIZ}", "The pass key is", first_integer, 6),
    "number_string": _Part(f"{_HIDDEN}. {_QUIZ}", "The sequence of digits is", first_integer, 12),
    "kv_retrieval": _Part(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
        "",
        whole_word,
        50,
    ),
    "longbook_sum_eng": _Part("Summarize the book below.\n\n{context}\n\nSummary:", "", rouge_lsum, 1200),
    "longbook_choice_eng": _Part(
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n{options}",
        "The letter of the correct answer is",
        choice_letter,
        40,
    ),
    "longbook_qa_eng": _Part(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {input}\n"
        "Answer:",
        "",
        english_f1,
        40,
    ),
    "longbook_qa_chn": _Part("阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：", "", chinese_f1, 40),
    "longdialogue_qa_eng": _Part(
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and '
        "you should try to guess who that character is.\n\n{context}",
        "The name that has been replaced with $$MASK$$ is likely",
        whole_word,
        40,
    ),
    "math_find": _Part("What is {target} in the following list?\n\n{context}\n\n{input}", "", first_number, 3),
    "math_calc": _Part(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
        "",
        leading_numbers,
        30000,
    ),
    "code_run": _Part(
        "There is a function called {function} in the following Python code.\n\n{context}\n\nPlease compute the exact "
        "value of {call}.",
        "The value of {call} is",
        last_integer,
        5,
    ),
    "code_debug": _Part(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\nOptions:\n{options}",
        "The correct option is:",
        choice_letter,
        5,
    ),
}
NAMES = tuple(f"infinitebench_{part}" for part in _PARTS)
_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (int, str),
    "context": (str, list),
    "input": (str,),
    "answer": (list, str, int, float),
}


def infinitebench(name: str, data: str | Path) -> DocumentTask:
    """Return a task of InfiniteBench: "infinitebench_passkey" is passkey.jsonl.

    Raises:
        InputError: no such task, or a missing or different file.
    """
    known = name.removeprefix("infinitebench_")
    part = _PARTS.get(known)
    if part is None:
        raise InputError(f"InfiniteBench has no task {known!r}{did_you_mean(known, list(_PARTS))}")
    check_packages(name, [part.score])
    file = find_file(data, [known + suffix for suffix in SUFFIXES], name)
    rows = read_rows(file, _FIELDS, "InfiniteBench")
    return DocumentTask(name, f"InfiniteBench, {known}", [_asked(row, part) for row in rows], keep_ends, file)


def _asked(row: FileRow, part: _Part) -> DocumentQuestion:
    context = row.values["context"]
    text = context if isinstance(context, str) else json.dumps(context)
    values = _values(row, part)
    lead, after = part.prompt.split("{context}")
    turn = QuestionAnswer(
        _filled(after, values).lstrip("\n"),
        _answers(row, part),
        part.score,
        part.max_new_tokens,
        _filled(part.prefix, values),
    )
    return DocumentQuestion(_filled(lead, values), text, turn, row.line)


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], template)


def _values(row: FileRow, part: _Part) -> dict[str, str]:
    question = row.values["input"]
    values = {"input": question}
    whole = part.prompt + part.prefix
    if "{options}" in whole:
        options = _options(row)
        values["options"] = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
    if "{target}" in whole:
        found = re.search(r"The \w+ number", question)
        if found is None:
            raise row.wrong(f"'input' names no number to find: {question[:100]!r}")
        values["target"] = found[0].lower()
    if "{call}" in whole:
        found = re.search(r"(\w+)\(-?\d+\)", question)
        if found is None:
            raise row.wrong(f"'input' has no call such as func_1(2): {question[:100]!r}")
        values |= {"call": found[0], "function": found[1]}
    return values


def _options(row: FileRow) -> list[str]:
    options = row.values.get("options")
    if not isinstance(options, list) or len(options) != 4:
        raise row.wrong(f"'options' must be a list of four, got {options!r}")
    return [str(option) for option in options]


def _answers(row: FileRow, part: _Part) -> tuple[str, ...]:
    answer: Any = row.values["answer"]
    answers = tuple(str(text) for text in (answer if isinstance(answer, list) else [answer]))
    if not answers or not answers[0].strip():
        raise row.wrong("'answer' is empty")
    if part.score is not choice_letter:
        return answers
    options = _options(row)
    for text in answers:
        if text in options:
            return ("ABCD"[options.index(text)],)
    raise row.wrong(f"'answer' is {answers[0]!r}, expected one of the options {options!r}")
