"""The grid of an evaluation: tasks, lengths, question modes and samples, under every setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

from kvsieve.errors import InputError
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.tasks.samples import Task

QUESTIONS = ("visible", "hidden")


@dataclass(frozen=True)
class Unit:
    """One sample in one question mode: computed and written as a whole.

    Attributes:
        task: of the sample.
        length: longest prompt, in tokens.
        question: "visible" or "hidden".
        index: of the sample.
        document: number of its document in the grid, from 1, and the number of documents.
        asked: number of the sample within its document, from 1, and the number of samples there.
    """

    task: Task
    length: int
    question: str
    index: int
    document: tuple[int, int] = (1, 1)
    asked: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        unit = f"{self.task.name}, {self.length} tokens"
        if self.asked[1] == 1:
            return unit
        return f"{unit}, document {self.document[0]} of {self.document[1]}, question {self.asked[0]} of {self.asked[1]}"

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.task.name, self.length, self.question, self.index


@dataclass(frozen=True)
class Grid:
    """Tasks x lengths x question modes (those a task has) x samples, under every setting, full KV first.

    Samples are those with indices from `first` to `samples`, exclusive.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    questions: Sequence[str]
    samples: int
    settings: Sequence[MethodSetting]
    seed: int = 0
    cost_samples: int = 3
    first: int = 0

    def units(self) -> Iterator[Unit]:
        """Yield units document by document, so that a run that is stopped early covers every task.

        The samples of one document are consecutive and share its prefill; samples with documents of their own alternate
        between tasks.
        """
        documents = [self._documents(task) for task in self.tasks]
        for number in range(max(map(len, documents), default=0)):
            for length in self.lengths:
                for task, samples in zip(self.tasks, documents, strict=True):
                    indices = samples[number] if number < len(samples) else []
                    for at, index in enumerate(indices, 1):
                        for question in self.questions:
                            if question in task.modes:
                                document = (number + 1, len(samples))
                                yield Unit(task, length, question, index, document, (at, len(indices)))

    def _documents(self, task: Task) -> list[list[int]]:
        """Return the indices of a task's samples, a list per document."""
        found: dict[int, list[int]] = {}
        for index in range(self.first, min(len(task), self.samples) if isinstance(task, Sized) else self.samples):
            found.setdefault(task.document(index), []).append(index)
        return list(found.values())

    def check(self, context: int | None) -> None:
        """Raise InputError for a grid without samples, or lengths that exceed the model's context."""
        if not any(question in task.modes for task in self.tasks for question in self.questions):
            names = ", ".join(task.name for task in self.tasks)
            raise InputError(
                f"{names}: no such task is asked with the question {'/'.join(self.questions)}; see --question"
            )
        for length in self.lengths:
            if length < 1 or (context is not None and length > context):
                raise InputError(
                    f"a length of {length} tokens is outside the model's context of {context}; change --lengths"
                )
