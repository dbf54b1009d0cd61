"""NoLiMa (arXiv 2502.05167): needles without words in common with the question, from its needle sets and books.

Prompts come from the user's needle set; nothing of the benchmark is included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.lab.tasks.base import BOTH
from kvsieve.lab.tasks.files import find_file
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import draw
from kvsieve.lab.tasks.metrics import contains
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample

DEPTHS = 26
NAMES = ("nolima", "nolima_hard")
_MOST = 192
# Default for needle sets without a template.
_TEMPLATE = (
    "Here is a part of a book. A question about it follows.\n\n{haystack}\n\nUse what the part of the book says or "
    "clearly implies.\n\nQuestion: {question}\n\nGive the answer only, without an explanation."
)


@dataclass(frozen=True)
class _NeedleTest:
    """A needle and a question about it, with {CHAR} open.

    Attributes:
        system, template: as in the needle set.
        characters: names for {CHAR}, which are the answers.
        answers: expected if there is no {CHAR}.
    """

    name: str
    system: str
    template: str
    needle: str
    question: str
    characters: tuple[str, ...]
    answers: tuple[str, ...]


class NoLiMa:
    """A needle set over the books of a haystack: every needle and question at 26 depths of every book.

    Samples are numbered in rounds over needles, each round with other depths and books, so that the first N are spread
    over all three.
    """

    def __init__(self, name: str, data: str | Path) -> None:
        """Read the files.

        Args:
            name: "nolima" for needle_set.json, "nolima_hard" for needle_set_hard.json, and so on.
            data: the benchmark's directory, with needlesets/ and haystack/rand_shuffle/ in it or below.

        Raises:
            InputError: a missing file, or one that is not NoLiMa's.
        """
        part = name.removeprefix("nolima")
        file = find_file(data, [f"needle_set{part}.json"], name)
        self.name, self.title, self.modes = name, f"NoLiMa{part.replace('_', ', ')}", BOTH
        self._needles = _needles(file)
        root = Path(os.path.expanduser(data))
        books = _books(root if root.is_dir() else file.parent.parent, name)
        self._books = [book.read_text(encoding="utf-8") for book in books]
        self.files = (file, *books)

    def __len__(self) -> int:
        return len(self._needles) * DEPTHS * len(self._books)

    def document(self, index: int) -> int:
        return index

    def sample(self, index: int, length: int, seed: int, count: Count) -> Sample:
        """Return sample `index`: as much of its book as `length` has room for. `seed` chooses the character.

        Raises:
            InputError: no such sample, or a length too small for the question.
        """
        if not 0 <= index < len(self):
            raise InputError(f"{self.name} has {len(self)} samples, got index {index}; ask for fewer samples")
        turn, number = divmod(index, len(self._needles))
        needle = self._needles[number]
        book = self._books[(turn // DEPTHS + turn % DEPTHS + number) % len(self._books)]
        depth = (11 * turn + 5 * number) % DEPTHS / (DEPTHS - 1)
        character = draw(seed, needle.name, 0, index).choice(needle.characters or ("",))
        fact, query = (text.replace("{CHAR}", character) for text in (needle.needle, needle.question))
        lead, after = needle.template.split("{haystack}")
        answers = (character,) if "{CHAR}" in needle.needle else needle.answers
        question = QuestionAnswer(after.replace("{question}", query).strip("\n"), answers, contains, _MOST)
        meta = {"document": index, "needle": needle.name, "depth": depth}

        def make(size: int) -> Sample:
            return Sample(lead + _hidden(book[:size], fact, depth), (question,), needle.system or None, meta=meta)

        whole = make(len(book))
        return whole if count(whole) <= length else fit(make, count, length, self.name)[0]


def _hidden(text: str, fact: str, depth: float) -> str:
    place = round(depth * len(text))
    before = text.rfind("\n", 0, place) + 1
    behind = text.find("\n", place) + 1 or len(text)
    at = before if place - before <= behind - place else behind
    parts = (text[:at].rstrip("\n"), fact, text[at:].lstrip("\n"))
    return "\n".join(part for part in parts if part)


def _books(root: Path, name: str) -> list[Path]:
    files = sorted(path for path in root.rglob("*.txt") if path.parent.name == "rand_shuffle")
    files = files or sorted(root.rglob("rand_book_*.txt"))
    if not files:
        raise InputError(f"no books of {name} in {root}: looked for haystack/rand_shuffle/*.txt there and below")
    return files


def _needles(file: Path) -> list[_NeedleTest]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}; expected NoLiMa's needle set, a list in JSON") from error
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{file} is {short(entries)}, expected NoLiMa's needle set: a list of needles")
    return [needle for number, entry in enumerate(entries, 1) for needle in _of(entry, f"{file}, needle {number}")]


def _of(entry: Any, where: str) -> list[_NeedleTest]:
    kinds = {"id": str, "needle": str, "questions": dict, "tests": dict}
    for field, kind in kinds.items():
        if not isinstance(entry, dict) or not isinstance(entry.get(field), kind) or not entry[field]:
            got = short(entry.get(field)) if isinstance(entry, dict) else short(entry)
            raise InputError(f"{where}: {field!r} is {got}, expected a {'text' if kind is str else 'filled object'}")
    if "distractors" in entry:
        raise InputError(f"{where}: needle sets with 'distractors' are not supported; take needle_set.json")
    template = entry.get("task_template") or _TEMPLATE
    if template.count("{haystack}") != 1 or "{question}" not in template.partition("{haystack}")[2]:
        raise InputError(f"{where}: 'task_template' must have {{haystack}} once and {{question}} behind it")
    found = []
    for kind, question in entry["questions"].items():
        for test, values in entry["tests"].items():
            found.append(_needle(entry, template, f"{entry['id']}_{test}_{kind}", question, values, where))
    return found


def _needle(entry: Mapping[str, Any], template: str, name: str, question: str, values: Any, where: str) -> _NeedleTest:
    arguments = values.get("input_args") if isinstance(values, dict) else None
    if not isinstance(arguments, list):
        raise InputError(f"{where}: the test {name} has no 'input_args', expected a list of texts")
    needle = entry["needle"]
    for number, argument in enumerate(arguments, 1):
        needle = needle.replace(f"{{{number}}}", str(argument))
        question = question.replace(f"{{{number}}}", str(argument))
    characters = tuple(entry.get("character_set") or ())
    answers = tuple(values.get("gold_answers") or ())
    if not (characters if "{CHAR}" in needle else answers):
        field = "character_set" if "{CHAR}" in needle else "gold_answers"
        raise InputError(f"{where}: {field!r} of {name} is missing or empty, expected a list of texts")
    return _NeedleTest(name, entry.get("system_prompt") or "", template, needle, question, characters, answers)
