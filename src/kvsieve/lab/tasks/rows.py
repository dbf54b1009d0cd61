"""Rows of context, question and answer as a task, and their scores."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.lab.tasks.document_task import DocumentQuestion, DocumentTask, keep_ends
from kvsieve.lab.tasks.files import FileRow, checked_row, read_rows
from kvsieve.lab.tasks.metrics import check_packages, english_f1, exact, rouge_l
from kvsieve.lab.tasks.samples import QuestionAnswer, Score
from kvsieve.lab.tasks.scoring import match_any
from kvsieve.planning.suggestions import did_you_mean

SCORES: dict[str, Score] = {"contains": match_any, "exact": exact, "f1": english_f1, "rouge": rouge_l}
# Prefix of these tasks' names, which no other task has.
PREFIX = "own_"
_FIELDS: dict[str, tuple[type, ...]] = {"context": (str,), "question": (str,)}
_ANSWER_TOKENS = 64


def rows_task(
    source: str | Path | Sequence[Mapping[str, Any]],
    score: str | Callable[..., Any] = "contains",
    *,
    answer_tokens: int = _ANSWER_TOKENS,
    owner: str = "kvsieve eval --task",
) -> DocumentTask:
    """Return the task of rows with "context", "question" and "answer" (or "answers": any of them is right).

    Questions about one context share it. A row may limit its answer by "max_new_tokens".

    Args:
        source: a file of JSON lines, gzip if its name ends in .gz; or the rows.
        score: a name of `SCORES`; a function (answer, expected texts) that returns a number from 0 to 1, or metrics
            with such a "score"; or its import path, "package.module:function".
        answer_tokens: longest answer of rows without "max_new_tokens".
        owner: the reader of the rows, for messages.

    Raises:
        InputError: a missing file or score, or a row without these fields, named with its line.
    """
    name, scored = chosen_score(score)
    file = Path(os.path.expanduser(source)) if isinstance(source, (str, Path)) else None
    questions = []
    for row in _rows(source if file is None else file, owner):  # type: ignore[arg-type]
        longest = row.values.get("max_new_tokens", answer_tokens)
        if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
            raise row.wrong(f"'max_new_tokens' must be a whole number of at least 1, got {short(longest)}")
        turn = QuestionAnswer(row.values["question"], _answers(row), scored, longest)
        questions.append(DocumentQuestion("", row.values["context"], turn, row.line))
    called = "rows" if file is None else file.name
    short_name = called.removesuffix(".gz").removesuffix(".jsonl")
    # Results with another score are results of another task.
    key = "_".join(re.findall(r"\w+", f"{PREFIX}{short_name} {name}"))
    return DocumentTask(key, f"{called}, {name}", questions, keep_ends, file)


def chosen_score(score: str | Callable[..., Any]) -> tuple[str, Score]:
    """Return a score's name and function; see `rows_task`. Raises InputError."""
    if callable(score):
        name = getattr(score, "__name__", type(score).__name__)
        return name, _checked(name, score)
    if score in SCORES:
        check_packages(f"--score {score}", [SCORES[score]])
        return score, SCORES[score]
    if isinstance(score, str) and score.count(":") == 1:
        return score.partition(":")[2], _checked(score, _imported(score))
    raise InputError(
        f"unknown score {short(score)}{did_you_mean(str(score), list(SCORES))}; a function of your own is given as "
        "package.module:function"
    )


def _imported(text: str) -> Callable[..., Any]:
    """Import "package.module:function", also from the current directory."""
    module, _, name = text.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        raise InputError(
            f"--score {text}: {error}; expected package.module:function, of an installed package or of a file in {here}"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise InputError(f"--score {text}: {module} has no function {name!r}")
    return found


def _checked(name: str, function: Callable[..., Any]) -> Score:
    """Wrap a user's function to return metrics and to name a wrong result."""

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        found = function(answer, expected)
        metrics = dict(found) if isinstance(found, Mapping) else {"score": found}
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, Real)}
        if len(numbers) < len(metrics) or not 0 <= numbers.get("score", -1) <= 1:
            raise InputError(
                f"the score {name} must return a number from 0 to 1, or metrics with such a 'score', got "
                f"{short(found)} for the answer {short(answer)}"
            )
        return numbers

    return score


def _rows(source: Path | Sequence[Mapping[str, Any]], owner: str) -> list[FileRow]:
    if isinstance(source, Path):
        return read_rows(source, _FIELDS, owner)
    rows = [checked_row(FileRow(Path("rows"), number, {}), dict(values), _FIELDS, owner)
            for number, values in enumerate(source, 1)]  # fmt: skip
    if not rows:
        raise InputError(f"{owner} was given no rows; give dicts with context, question and answer")
    return rows


def _answers(row: FileRow) -> tuple[str, ...]:
    if "answer" not in row.values and "answers" not in row.values:
        raise row.wrong("'answer' is missing; expected a text, or a list of texts of which any is right")
    value = row.values["answer"] if "answer" in row.values else row.values["answers"]
    answers = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not answers or not all(isinstance(text, str) and text.strip() for text in answers):
        raise row.wrong("'answer' must be a text or a list of texts, none of them empty")
    return answers
