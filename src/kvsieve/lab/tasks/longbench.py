"""LongBench (arXiv 2308.14508): its JSONL files, with its prompts (MIT licence), answer lengths and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsieve.errors import InputError
from kvsieve.lab.tasks.document_task import DocumentQuestion, DocumentTask, keep_ends
from kvsieve.lab.tasks.files import SUFFIXES, FileRow, find_file, read_rows
from kvsieve.lab.tasks.metrics import (
    check_packages,
    chinese_rouge_l,
    chinese_word_f1,
    code_similarity,
    english_f1,
    first_line,
    number_share,
    one_of,
    rouge_l,
)
from kvsieve.lab.tasks.samples import QuestionAnswer, Score
from kvsieve.planning.suggestions import did_you_mean


@dataclass(frozen=True)
class _Dataset:
    """One of LongBench's datasets.

    Attributes:
        prompt: with {context} and {input}.
        score: None for the share of named classes that are right.
        max_new_tokens: longest answer.
        first_line: score only the answer's first line.
    """

    prompt: str
    score: Score | None
    max_new_tokens: int
    first_line: bool = False


_CONCISELY = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_ONLY = "Only give me the answer and do not output any other words."
_PASSAGES = (
    f"Answer the question based on the given passages. {_ONLY}\n\nThe following are given passages.\n{{context}}\n\n"
    f"Answer the question based on the given passages. {_ONLY}\n\nQuestion: {{input}}\nAnswer:"
)
_CODE = "Please complete the code given below. \n{context}"
_DATASETS = {
    "narrativeqa": _Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}"
        "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
        "Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        english_f1,
        128,
    ),
    "qasper": _Dataset(
        f"You are given a scientific article and a question. Answer the question {_CONCISELY}\n\nArticle: {{context}}"
        f"\n\n Answer the question based on the above article {_CONCISELY}\n\nQuestion: {{input}}\n\nAnswer:",
        english_f1,
        128,
    ),
    "multifieldqa_en": _Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        english_f1,
        64,
    ),
    "multifieldqa_zh": _Dataset(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。"
        "\n\n问题：{input}\n回答：",
        chinese_word_f1,
        64,
    ),
    "hotpotqa": _Dataset(_PASSAGES, english_f1, 32),
    "2wikimqa": _Dataset(_PASSAGES, english_f1, 32),
    "musique": _Dataset(_PASSAGES, english_f1, 32),
    "dureader": _Dataset(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        chinese_rouge_l,
        128,
    ),
    "gov_report": _Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        rouge_l,
        512,
    ),
    "qmsum": _Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        rouge_l,
        512,
    ),
    "multi_news": _Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write "
        "a one-page summary of all the news.\n\nSummary:",
        rouge_l,
        512,
    ),
    "vcsum": _Dataset(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        chinese_rouge_l,
        512,
    ),
    "trec": _Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        None,
        64,
        True,
    ),
    "triviaqa": _Dataset(
        f"Answer the question based on the given passage. {_ONLY} The following are some examples.\n\n{{context}}\n\n"
        "{input}",
        english_f1,
        32,
        True,
    ),
    "samsum": _Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        rouge_l,
        128,
        True,
    ),
    "lsht": _Dataset("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", None, 64, True),
    "passage_count": _Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        number_share,
        32,
    ),
    "passage_retrieval_en": _Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer '
        "is: ",
        number_share,
        32,
    ),
    "passage_retrieval_zh": _Dataset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        number_share,
        32,
    ),
    "lcc": _Dataset(f"{_CODE}Next line of code:\n", code_similarity, 64),
    "repobench-p": _Dataset(f"{_CODE}{{input}}Next line of code:\n", code_similarity, 64),
}
NAMES = tuple(f"longbench_{dataset}" for dataset in _DATASETS)
_FIELDS: dict[str, tuple[type, ...]] = {
    "input": (str,),
    "context": (str,),
    "answers": (list,),
    "all_classes": (list, type(None)),
    "dataset": (str,),
}


def longbench(name: str, data: str | Path) -> DocumentTask:
    """Return a dataset of LongBench: "longbench_qasper" is qasper.jsonl, "longbench_qasper_e" that of LongBench-E.

    Raises:
        InputError: no such dataset, or a missing or different file.
    """
    part = name.removeprefix("longbench_")
    dataset = _DATASETS.get(part.removesuffix("_e"))
    if dataset is None:
        raise InputError(f"LongBench has no dataset {part!r}{did_you_mean(part, list(_DATASETS))}")
    check_packages(name, [dataset.score] if dataset.score else [])
    file = find_file(data, [part + suffix for suffix in SUFFIXES], name)
    rows = read_rows(file, _FIELDS, "LongBench")
    return DocumentTask(name, f"LongBench, {part}", [_asked(row, part, dataset) for row in rows], keep_ends, file)


def _asked(row: FileRow, part: str, dataset: _Dataset) -> DocumentQuestion:
    values = row.values
    if values["dataset"].removesuffix("_e") != part.removesuffix("_e"):
        raise row.wrong(f"'dataset' is {values['dataset']!r}, expected {part!r}; give the file of that dataset")
    answers = _texts(row, "answers", values["answers"])
    lead, after = dataset.prompt.split("{context}")
    score = dataset.score
    if score is None:
        score = one_of(_texts(row, "all_classes", values["all_classes"] or ()))
    turn = QuestionAnswer(
        after.replace("{input}", values["input"]).lstrip("\n"),
        answers,
        first_line(score) if dataset.first_line else score,
        dataset.max_new_tokens,
        golden=answers[0],
    )
    return DocumentQuestion(lead, values["context"], turn, row.line)


def _texts(row: FileRow, field: str, values: Sequence[object]) -> tuple[str, ...]:
    texts = tuple(value for value in values if isinstance(value, str))
    if not texts or len(texts) < len(values):
        raise row.wrong(f"{field!r} must be a list of texts, at least one; got {list(values)!r}")
    return texts
