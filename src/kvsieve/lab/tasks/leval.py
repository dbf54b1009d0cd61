"""L-Eval (arXiv 2307.11088): several instructions on each long document, from its published JSONL files.

Prompts paraphrase the benchmark's; scores follow its definitions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.lab.tasks.document_task import Cut, DocumentQuestion, DocumentTask, keep_beginning, keep_end
from kvsieve.lab.tasks.files import SUFFIXES, FileRow, find_file, read_rows
from kvsieve.lab.tasks.metrics import (
    check_packages,
    choice_letter,
    choice_letters,
    english_f1,
    final_number,
    named,
    rouge_l,
    says_last,
    verdict,
)
from kvsieve.lab.tasks.samples import QuestionAnswer, Score

_DOCUMENT = "Below is a long document. Answer the question that follows it from what the document says."
_DIRECT = "\nGive the answer directly, without any explanation."
_CHOICE = "Below is a long document. Answer the multiple-choice question that follows it. "


@dataclass(frozen=True)
class _Form:
    """A way in which L-Eval asks and scores.

    Attributes:
        lead, after: around the document and the instruction.
        score: compares the answer with the expected one.
        max_new_tokens: longest answer; None for three tokens per word of the expected one, as named in the prompt.
    """

    lead: str
    after: str
    score: Score
    max_new_tokens: int | None
    cut: Cut = keep_beginning


_ONE_LETTER = _Form(f"{_CHOICE}One option is right.", "\nAnswer with the letter of the right option only.",
                    choice_letter, 16)  # fmt: skip
_FORMS = {
    "quality": _ONE_LETTER,
    "tpo": _ONE_LETTER,
    "coursera": _Form(
        f"{_CHOICE}One or several options are right.",
        "\nAnswer with the letters of all right options only, such as A or AB.",
        choice_letters,
        16,
    ),
    "topic_retrieval_longchat": _Form(
        "Below is a record of our conversation so far, on many topics, one after another: you are the ASSISTANT, I am "
        "the USER. Each topic begins with 'I would like to discuss the topic of'. Remember the topics: at the end I "
        "will ask you for the name of one of them.",
        "",
        named,
        32,
    ),
    "gsm100": _Form(
        "Below are questions and their answers. Answer the last question in the same way, and end with 'The answer is' "
        "and the number.",
        "",
        final_number,
        320,
    ),
    "codeU": _Form(
        "Below is a code base of many functions with comments. Read it: you will be asked what some calls return.",
        "",
        says_last,
        128,
        keep_end,
    ),
    "sci_fi": _Form(
        "Below is a science fiction story. Say whether the statement that follows it is True or False, by what the "
        "story says and not by what you know.",
        "\nAnswer True or False.",
        verdict,
        16,
    ),
}
_BY_METRIC = {
    "exam": _Form(_DOCUMENT, _DIRECT, named, 64),
    "f1": _Form(_DOCUMENT, "", english_f1, None),
    "rouge": _Form("Below is a long document. Follow the instruction after it.", "", rouge_l, None),
}
_FIELDS: dict[str, tuple[type, ...]] = {
    "input": (str,),
    "instructions": (list,),
    "outputs": (list,),
    "evaluation": (str,),
}
_MOST = 512
NAMES = tuple(
    f"leval_{part}"
    for part in (
        *_FORMS,
        *("financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa", "narrative_qa"),
        *("natural_question", "news_summ", "paper_assistant", "patent_summ", "review_summ", "scientific_qa"),
        "tv_show_summ",
    )
)


def leval(name: str, data: str | Path) -> DocumentTask:
    """Return a file of L-Eval as a task: "leval_quality" is quality.jsonl or quality.jsonl.gz.

    Rows that L-Eval has judged by a model or by people are skipped, as in its own automatic evaluation.

    Raises:
        InputError: a missing file, or one that is not L-Eval's.
    """
    part = name.removeprefix("leval_")
    file = find_file(data, [part + suffix for suffix in SUFFIXES], name)
    rows = read_rows(file, _FIELDS, "L-Eval")
    for row in rows:
        _check(row)
    scored = [row for row in rows if row.values["evaluation"] in _BY_METRIC]
    if not scored:
        raise rows[0].wrong(
            f"no row of this file has a metric: 'evaluation' is {rows[0].values['evaluation']!r}, expected "
            f"{', '.join(_BY_METRIC)} in some of them"
        )
    forms = [_FORMS.get(part, _BY_METRIC[row.values["evaluation"]]) for row in scored]
    check_packages(name, {form.score for form in forms})
    questions = [question for row, form in zip(scored, forms, strict=True) for question in _asked(row, form)]
    return DocumentTask(name, f"L-Eval, {part.replace('_', ' ')}", questions, forms[0].cut, file)


def _check(row: FileRow) -> None:
    questions = row.values["instructions"]
    answers = row.values["outputs"]
    for field, texts in (("instructions", questions), ("outputs", answers)):
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise row.wrong(f"{field!r} must be a list of texts, none of them empty")
    if len(questions) != len(answers):
        raise row.wrong(f"'instructions' has {len(questions)} entries and 'outputs' {len(answers)}; expected as many")


def _asked(row: FileRow, form: _Form) -> list[DocumentQuestion]:
    pairs = zip(row.values["instructions"], row.values["outputs"], strict=True)
    turns = [_turn(row, form, question.strip(), answer.strip()) for question, answer in pairs]
    return [DocumentQuestion(f"{form.lead}\n\n", row.values["input"].strip(), turn, row.line) for turn in turns]


def _turn(row: FileRow, form: _Form, question: str, answer: str) -> QuestionAnswer:
    expected = _expected(row, form, answer)
    if form.max_new_tokens is not None:
        return QuestionAnswer(f"{question}{form.after}", (expected,), form.score, form.max_new_tokens, golden=answer)
    words = len(answer.split())
    instruction = f"{question}\nAnswer with {words} {'word' if words == 1 else 'words'}."
    return QuestionAnswer(instruction, (expected,), form.score, min(16 + 3 * words, _MOST))


def _expected(row: FileRow, form: _Form, answer: str) -> Any:
    """Return the expected text for the score: the letter of a choice, the verdict of a statement, else the answer."""
    if form.score in (choice_letter, choice_letters):
        letters = re.match(r"\W*([A-D]+)(?![\w'])", answer)
        if letters is None:
            raise row.wrong(f"'outputs' has {answer!r}, which begins with no letter of an option (A to D)")
        return letters[1]
    if form.score is verdict:
        return answer.split("[")[0].strip()
    if form.score is final_number and not re.search(r"\d", answer):
        raise row.wrong(f"'outputs' has {answer!r}, expected a number")
    return answer
