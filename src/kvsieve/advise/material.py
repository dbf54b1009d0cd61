"""Prompts that plans are measured on: generated ones, windows of a text, or rows of context, question and answer."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsieve.errors import InputError
from kvsieve.tasks import chosen_tasks
from kvsieve.tasks.base import Generated
from kvsieve.tasks.document_task import DocumentTask
from kvsieve.tasks.files import SUFFIXES
from kvsieve.tasks.fit import Count, fit
from kvsieve.tasks.haystack import load_haystack, passage
from kvsieve.tasks.rows import rows_task
from kvsieve.tasks.samples import QuestionAnswer, Sample, Task

# Long answers, of which eviction may lose a part.
PROBES = ("ruler_niah_single_3", "passkey64")
TASKS = ("needle", "ruler_niah_multikey_1", "ruler_qa_1", *PROBES)
_ANSWER = 32
_PARTS = ("chosen by", "held back")
# Evaluation and calibration draw their samples with smaller seeds.
_SEED = 3 * 10**6
_INDICES = 10**6


@dataclass(frozen=True)
class Drawn:
    """A sample and the task that it is of."""

    task: str
    sample: Sample


@dataclass(frozen=True)
class AdviceMaterial:
    """Tasks that the loss is measured on, and those that show what happens to long answers.

    Attributes:
        source: what it is, for people.
        tasks: of the loss; each counts alike.
        probes: of long answers, not in the loss unless they are among the tasks.
        per_task: how many times the number of samples asked for each task has.
    """

    source: str
    tasks: tuple[Task, ...]
    probes: tuple[Task, ...]
    per_task: int = 1

    def drawn(self, part: int, samples: int, length: int, seed: int, count: Count) -> list[Drawn]:
        """Samples of each task for part 0, 1, ...; different parts and seeds have different documents.

        Raises InputError where there are too few, or a task does not suit the length.
        """
        found = []
        for task in self.tasks:
            found += _draw(task, part, samples * self.per_task, length, seed, count)
        return found

    def probe_samples(self, samples: int, length: int, seed: int, count: Count) -> list[Drawn]:
        """Samples of the probes that are not among the tasks."""
        others = [task for task in self.probes if task.name not in {each.name for each in self.tasks}]
        return [each for task in others for each in _draw(task, 0, samples, length, seed, count)]


def built_in() -> AdviceMaterial:
    """Generated prompts: facts to find in text, questions about documents, UUIDs and a number of 64 digits."""
    tasks = chosen_tasks(TASKS)
    probes = tuple(task for task in tasks if task.name in PROBES)
    return AdviceMaterial(f"generated: {', '.join(TASKS)}", tuple(tasks), probes)


def from_file(path: Path) -> AdviceMaterial:
    """A text, read in windows, or JSON lines with "context", "question" and "answer".

    Raises InputError for a file that is neither.
    """
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise InputError(f"--task must name a text or a file of JSON lines, got {str(path)!r}, which is no file")
    if path.name.endswith(SUFFIXES):
        task: Task = rows_task(path, answer_tokens=_ANSWER, owner="kvsieve advise --task")
    else:
        task = _windows(path)
    return AdviceMaterial(path.name, (task,), tuple(chosen_tasks(PROBES)), per_task=len(TASKS))


@dataclass(frozen=True)
class Windows(Generated):
    """Windows of a text, which the model is asked to go on with: the loss needs no right answer."""

    name: str = "text"
    title: str = "Windows of a text"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        start = rng.random()
        turn = QuestionAnswer("Continue this text from where it ends.", ("",), _no_score, _ANSWER)

        def make(words: int) -> Sample:
            return Sample("".join(passage(self.text, start, words)).strip(), (turn,))

        return fit(make, count, length, self.name)[0]


def _no_score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
    return {"score": 1.0}


def _windows(path: Path) -> Windows:
    return Windows(load_haystack(str(path)))


def _draw(task: Task, part: int, samples: int, length: int, seed: int, count: Count) -> list[Drawn]:
    if isinstance(task, DocumentTask):
        indices = _of_part(task, part, samples)
        return [Drawn(task.name, task.sample(index, length, seed, count)) for index in indices]
    own = _SEED + 10 * seed + part
    # Depths follow from the index, so they are drawn as well.
    indices = random.Random(f"{own}/{task.name}").sample(range(_INDICES), samples)
    return [Drawn(task.name, task.sample(index, length, own, count)) for index in indices]


def _of_part(task: DocumentTask, part: int, samples: int) -> Sequence[int]:
    """Questions about every other document: parts have none in common."""
    mine = [index for index in range(len(task)) if task.document(index) % 2 == part % 2]
    if len(mine) < 2:
        raise InputError(
            f"{task.title} has too few documents to choose by some and hold others back: {len(mine)} questions are "
            f"left for the part {_PARTS[part % 2]!r}, at least 2 are needed; give a file with more contexts"
        )
    return mine[:samples]
