"""The grid of an evaluation: tasks, lengths, question modes and samples, under every setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

from kvsieve.errors import InputError
from kvsieve.eval.cells import MethodSetting
from kvsieve.tasks.samples import Task

QUESTIONS = ("visible", "hidden")


@dataclass(frozen=True)
class Unit:
    """One sample asked in one way: what is computed and written together."""

    task: Task
    length: int
    question: str
    index: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        return self.task.name, self.length, self.question, self.index


@dataclass(frozen=True)
class Grid:
    """tasks x lengths x question modes (those a task has) x samples, under every setting, the first of them full KV."""

    tasks: Sequence[Task]
    lengths: Sequence[int]
    questions: Sequence[str]
    samples: int
    settings: Sequence[MethodSetting]
    seed: int = 0
    cost_samples: int = 3

    def units(self) -> Iterator[Unit]:
        """Sample by sample, so that a run that is stopped early has something of everything."""
        for index in range(self.samples):
            for length in self.lengths:
                for task in self.tasks:
                    if index >= (len(task) if isinstance(task, Sized) else self.samples):
                        continue
                    for question in self.questions:
                        if question in task.modes:
                            yield Unit(task, length, question, index)

    def check(self, context: int | None) -> None:
        """Raises InputError for a grid without samples, or lengths the model's context has no room for."""
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
