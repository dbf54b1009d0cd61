"""Tasks of questions about documents, for public benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsieve.errors import InputError
from kvsieve.lab.tasks.base import BOTH
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample

Cut = Callable[[str, int], str]
"""(text, size) -> `size` of its characters: the benchmark's rule for documents that are too long."""


def keep_beginning(text: str, size: int) -> str:
    return text[:size]


def keep_end(text: str, size: int) -> str:
    return text[len(text) - size :]


def keep_ends(text: str, size: int) -> str:
    return text[: size - size // 2] + text[len(text) - size // 2 :]


@dataclass(frozen=True)
class DocumentQuestion:
    """A question about a document.

    Attributes:
        lead: instruction before the text, never cut.
        text: the document.
        turn: the question and its answer.
        line: of the file, from 1.
    """

    lead: str
    text: str
    turn: QuestionAnswer
    line: int


class DocumentTask:
    """Questions about documents, each question a sample; questions about one text share a document.

    Samples are numbered in rounds: one question of every document, then a second of each that has one, and so on. The
    first N are thus spread evenly over the documents, and do not depend on N. Each document begins with another of its
    questions, since a file may ask all its documents the same ones in the same order.
    """

    def __init__(
        self, name: str, title: str, asked: Sequence[DocumentQuestion], cut: Cut | None, file: Path | None
    ) -> None:
        """cut: truncation rule for long documents; None refuses them. file: source of the rows, or None."""
        self.name = name
        self.title = title
        self.modes = BOTH
        self.files = () if file is None else (file,)
        self._cut = cut
        documents: dict[tuple[str, str], list[DocumentQuestion]] = {}
        for question in asked:
            documents.setdefault((question.lead, question.text), []).append(question)
        self._documents = list(documents.values())
        self._samples = [
            (number, (number + turn) % len(questions))
            for turn in range(max(map(len, self._documents)))
            for number, questions in enumerate(self._documents)
            if turn < len(questions)
        ]
        self._contexts: dict[tuple[int, int, Count], tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def document(self, index: int) -> int:
        return self._place(index)[0]

    def sample(self, index: int, length: int, seed: int, count: Count) -> Sample:
        """Return question `index` about its document, cut to `length` tokens if needed; `seed` is ignored.

        The cut leaves room for the document's longest question, so that all questions share one context. `meta` has the
        number of tokens cut ("cut").

        Raises:
            InputError: no such question, or a document that cannot be cut to `length`.
        """
        number, turn = self._place(index)
        question = self._documents[number][turn]
        key = number, length, count
        if key not in self._contexts:
            self._contexts[key] = self._context(number, length, count)
        context, cut = self._contexts[key]
        meta = {"document": number, "question": turn, "line": question.line, "cut": cut}
        return Sample(context, (question.turn,), meta=meta)

    def tokens(self, count: Count) -> int:
        """Return the length of the longest prompt without cuts."""
        return max(
            count(Sample(question.lead + question.text, (question.turn,)))
            for own in self._documents
            for question in own
        )

    @property
    def answer_tokens(self) -> int:
        return max(question.turn.max_new_tokens for own in self._documents for question in own)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise InputError(f"{self.name} has {len(self)} questions, got index {index}; ask for fewer samples")
        return self._samples[index]

    def _context(self, number: int, length: int, count: Count) -> tuple[str, int]:
        """Return the document with its lead, cut to the room in `length`, and how many of its tokens were cut."""
        questions = self._documents[number]
        lead = questions[0].lead
        text = questions[0].text
        cut = self._cut
        longest = max((question.turn for question in questions), key=lambda turn: count(Sample(".", (turn,))))

        def make(size: int) -> Sample:
            body = text if cut is None or size >= len(text) else cut(text, size).strip()
            return Sample(lead + body, (longest,))

        tokens = count(make(len(text)))
        if tokens <= length:
            return lead + text, 0
        where = f"line {questions[0].line} of {self.name}"
        if cut is None:
            raise InputError(
                f"{where} makes a prompt of {tokens} tokens, more than the length of {length}; raise --lengths, or "
                "make the file for a smaller length"
            )
        sample = fit(make, count, length, where)[0]
        return sample.context, tokens - count(sample)
