"""SCBench (arXiv 2412.10319, hub id microsoft/SCBench): several questions on one long context.

Rows come from the hub through `datasets`, or from a local copy. Instructions and scores follow the benchmark's public
definitions: numbers are comparable between methods here, but not exactly with published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError
from kvsieve.lab.tasks.document_task import keep_ends
from kvsieve.lab.tasks.files import SUFFIXES, find_file, read_rows
from kvsieve.lab.tasks.fit import fit
from kvsieve.lab.tasks.metrics import (
    check_packages,
    chinese_f1,
    choice_letter,
    contains,
    english_f1,
    first_number,
    label_match,
    rouge_l,
    same_function,
)
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Score
from kvsieve.lab.tasks.scoring import match_all
from kvsieve.planning.suggestions import did_you_mean

HUB_ID = "microsoft/SCBench"


@dataclass(frozen=True)
class _Kind:
    """A kind of question: its wording and score."""

    title: str
    score: Score
    max_new_tokens: int
    instruction: str = ""
    question: str = "{input}"


_KV = _Kind("key-value retrieval", contains, 150, "Here is a JSON object. Give the value of the key you are asked for.")
_REPO = _Kind(
    "function retrieval",
    same_function,
    1024,
    "Here is code of a repository. Find the function that is described and repeat it exactly, in a ``` block.",
)
_SUMMARY = _Kind("summary", rouge_l, 200)
_QA = "Read this book. Answer questions about it as briefly as you can."

_KINDS = {
    "scbench_kv": _KV,
    "scbench_prefix_suffix": _Kind("retrieval by prefix and suffix", contains, 150),
    "scbench_vt": _Kind("variable tracking", match_all, 30),
    "scbench_repoqa": _REPO,
    "scbench_qa_eng": _Kind("English questions", english_f1, 40, _QA, "Question: {input}"),
    "scbench_qa_chn": _Kind(
        "Chinese questions", chinese_f1, 40, "请阅读下面的书，然后尽量简短地回答问题。", "问题：{input}"
    ),
    "scbench_choice_eng": _Kind(
        "multiple choice", choice_letter, 40, _QA, "Question: {input}\n{options}\nAnswer with the letter only."
    ),
    "scbench_many_shot": _Kind("many-shot classification", label_match, 10),
    "scbench_summary": _SUMMARY,
    "scbench_mf": _Kind("numbers in a list", first_number, 16, "Here is a list of numbers."),
    "scbench_summary_with_needles": replace(_SUMMARY, title="summary and passkeys", max_new_tokens=800),
    "scbench_repoqa_and_kv": replace(_REPO, title="functions and key-value pairs", instruction=""),
}
# Task names in the turns of a mixed subset.
_MIXED = {
    "scbench_summary_with_needles": {
        "scbench_summary": _KINDS["scbench_summary_with_needles"],
        "scbench_passkey": _Kind("passkey", first_number, 15),
    },
    "scbench_repoqa_and_kv": {"scbench_repoqa": _REPO, "scbench_kv": replace(_KV, max_new_tokens=80)},
}
SUBSETS = tuple(_KINDS)


class SCBench:
    """A subset of SCBench as a task. Rows of a file are checked at once, those of the hub one by one on access."""

    def __init__(self, subset: str, source: str | Path | None = None, mode: str = "multi-turn") -> None:
        """Read the rows.

        Args:
            subset: one of SUBSETS.
            source: a JSONL file of its rows, or a directory with ``SUBSET.jsonl`` in it or below; None for the hub.
            mode: "multi-turn" asks a row's questions one after another in one conversation, "shared" each on its own
                copy of the context.

        Raises:
            InputError: an unknown subset or mode, or missing or invalid rows.
        """
        if subset not in _KINDS:
            raise InputError(f"SCBench has no subset {subset!r}{did_you_mean(subset, list(SUBSETS))}")
        if mode not in ("multi-turn", "shared"):
            raise InputError(f"SCBench's mode is 'multi-turn' or 'shared', got {mode!r}")
        self.name = subset
        self.title = f"SCBench, {_KINDS[subset].title}"
        self.shared = mode == "shared"
        # On copies of one context a question cannot be seen when the context is reduced.
        self.modes = ("hidden",) if self.shared else ("visible", "hidden")
        check_packages(subset, {kind.score for kind in (_KINDS[subset], *_MIXED.get(subset, {}).values())})
        self.rows: Sequence[Any]
        self._places: list[str] = []
        self.files: tuple[Path, ...] = ()
        if source is None:
            self.rows = _hub_rows(subset)
        else:
            self.files = (find_file(source, [subset + suffix for suffix in SUFFIXES], subset),)
            found = read_rows(self.files[0], _FIELDS, "SCBench")
            self._places = [f"{row.file}, line {row.line}" for row in found]
            self.rows = [row.values for row in found]
            for index, row in enumerate(self.rows):
                self._text(row, index)
                self._turns(row, index)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, length: int, seed: int, count: Callable[[Sample], int]) -> Sample:
        """Return row `index`, with the middle of its context cut if the prompt exceeds `length` tokens.

        `seed` is ignored; `meta` has the number of tokens cut ("cut").

        Raises:
            InputError: an index past the last row, a row that lacks a field, or questions longer than `length`.
        """
        if not 0 <= index < len(self.rows):
            raise InputError(f"{self.name} has {len(self.rows)} rows, got index {index}; ask for fewer samples")
        row = self.rows[index]
        text = self._text(row, index)
        turns = tuple(self._turns(row, index))
        instruction = _KINDS[self.name].instruction
        lead = f"{instruction}\n\n" if instruction else ""
        meta = {"document": index, "id": row.get("id"), "mode": "shared" if self.shared else "multi-turn", "cut": 0}

        def make(size: int) -> Sample:
            body = text if size >= len(text) else keep_ends(text, size)
            return Sample(lead + body, turns, independent=self.shared, meta=meta)

        sample = make(len(text))
        tokens = count(sample)
        if tokens <= length:
            return sample
        sample = fit(make, count, length, self._place(index))[0]
        return replace(sample, meta={**meta, "cut": tokens - count(sample)})

    def _place(self, index: int) -> str:
        return self._places[index] if self._places else f"row {index} of {self.name}"

    def _text(self, row: Mapping[str, Any], index: int) -> str:
        context = row.get("context", row.get("input"))
        if context is None:
            raise InputError(f"{self._place(index)} has no 'context'; {_SCHEMA}")
        return (context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)).strip()

    def document(self, index: int) -> int:
        return index

    def _turns(self, row: Mapping[str, Any], index: int) -> list[QuestionAnswer]:
        raw = row.get("multi_turns")
        if not isinstance(raw, list) or not raw:
            raise InputError(f"{self._place(index)} has no 'multi_turns'; {_SCHEMA}")
        kinds = [self._kind(turn, f"turn {number} of {self._place(index)}") for number, turn in enumerate(raw)]
        functions = [
            answer
            for turn, kind in zip(raw, kinds, strict=True)
            if kind.score is same_function
            for answer in _answers(turn)
        ]
        turns = []
        for turn, kind in zip(raw, kinds, strict=True):
            answers = _answers(turn)
            options = [str(option) for option in turn.get("options") or ()]
            if kind.score is choice_letter:
                answers = (_letter(answers, options, self._place(index)),)
            golden = ", ".join(answers) if kind.score is match_all else answers[0]
            if kind.score is same_function:
                answers = (*answers[:1], *(function for function in functions if function != answers[0]))
            listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=False))
            question = kind.question.replace("{options}", listed).replace("{input}", str(turn["input"]))
            turns.append(QuestionAnswer(question, answers, kind.score, kind.max_new_tokens, golden=golden))
        return turns

    def _kind(self, turn: Any, where: str) -> _Kind:
        missing = [name for name in ("input", "answer") if not isinstance(turn, dict) or turn.get(name) is None]
        if missing or not _answers(turn):
            raise InputError(f"{where} has no {' and no '.join(missing) or 'answer'}; {_SCHEMA}")
        if self.name not in _MIXED:
            return _KINDS[self.name]
        kinds = _MIXED[self.name]
        if turn.get("task") not in kinds:
            raise InputError(f"{where} must name its task, one of {', '.join(kinds)}; got {turn.get('task')!r}")
        return kinds[turn["task"]]


_FIELDS: dict[str, tuple[type, ...]] = {"multi_turns": (list,)}
_SCHEMA = "expected rows {'id', 'context', 'multi_turns': [{'input', 'answer', ...}, ...]}"


def _answers(turn: dict[str, Any]) -> tuple[str, ...]:
    answer = turn["answer"]
    return tuple(str(text) for text in (answer if isinstance(answer, list) else [answer]))


def _letter(answers: tuple[str, ...], options: list[str], where: str) -> str:
    for answer in answers:
        if answer in tuple("ABCD")[: len(options)]:
            return answer
        if answer in options:
            return "ABCD"[options.index(answer)]
    raise InputError(f"{where}: the answer {answers!r} is neither a letter nor one of the options {options!r}")


def _hub_rows(subset: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(
            "SCBench from the hub needs the package `datasets`: pip install 'kvsieve[scbench]', or pass a local copy"
        ) from error
    try:
        splits = load_dataset(HUB_ID, subset)
    except Exception as error:  # the hub, its cache and datasets each raise their own
        cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise InputError(
            f"cannot load {subset} of {HUB_ID} from the hub: {cause}; pass a local copy instead, the file "
            f"{subset}.jsonl or its directory (--data PATH, SCBench({subset!r}, source=PATH))"
        ) from error
    return splits["test"] if "test" in splits else next(iter(splits.values()))
