"""Prompts to measure plans on: generated ones, windows of a text, or rows of context, question and answer."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from kvsieve.errors import InputError
from kvsieve.lab.tasks import chosen_tasks
from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.document_task import DocumentTask
from kvsieve.lab.tasks.files import SUFFIXES
from kvsieve.lab.tasks.fit import Count, fit
from kvsieve.lab.tasks.haystack import load_haystack, passage
from kvsieve.lab.tasks.rows import rows_task
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Task

# Long answers, which eviction may lose in part.
PROBES = ("ruler_niah_single_3", "passkey64")
TASKS = ("needle", "ruler_niah_multikey_1", "ruler_qa_1", *PROBES)
_ANSWER = 32
# Questions needed: in all; in each part for parts of different documents; and for no caution.
_LEAST = 3
_ENOUGH = 2
_FEW = 10
# Evaluation and calibration draw their samples with smaller seeds.
_SEED = 3 * 10**6
_INDICES = 10**6


@dataclass(frozen=True)
class Drawn:
    """A sample and its task."""

    task: str
    sample: Sample


@dataclass(frozen=True)
class AdviceMaterial:
    """Tasks that measure the loss, and tasks that probe long answers.

    Attributes:
        source: a description for people.
        tasks: of the loss, with equal weight.
        probes: of long answers, not in the loss unless they are among the tasks.
        per_task: factor of the number of samples for each task.
        caution: the limits of so few questions or documents; None if there are enough.
    """

    source: str
    tasks: tuple[Task, ...]
    probes: tuple[Task, ...]
    per_task: int = 1
    caution: str | None = None

    def drawn(self, part: int, samples: int, length: int, seed: int, count: Count) -> list[Drawn]:
        """Return samples of each task for part 0, 1, ...; different parts and seeds have different documents.

        Raises InputError if there are too few, or a task does not suit the length.
        """
        found = []
        for task in self.tasks:
            found += _draw(task, part, samples * self.per_task, length, seed, count)
        return found

    def longest(self, length: int, count: Count) -> int:
        """Return the tokens of the longest prompt for a length; prompts of files may be shorter."""
        found = [task.tokens(count) if isinstance(task, DocumentTask) else length for task in self.tasks]
        return min(length, max(found))

    def probe_samples(self, samples: int, length: int, seed: int, count: Count) -> list[Drawn]:
        """Return samples of the probes that are not among the tasks."""
        others = [task for task in self.probes if task.name not in {known.name for known in self.tasks}]
        return [sample for task in others for sample in _draw(task, 0, samples, length, seed, count)]


def built_in() -> AdviceMaterial:
    """Return generated prompts: facts to find in text, questions about documents, UUIDs and a 64-digit number."""
    tasks = chosen_tasks(TASKS)
    probes = tuple(task for task in tasks if task.name in PROBES)
    return AdviceMaterial(f"generated: {', '.join(TASKS)}", tuple(tasks), probes)


def from_file(path: Path) -> AdviceMaterial:
    """Return prompts from a text, in windows, or from JSON lines with "context", "question" and "answer".

    Raises InputError for any other file.
    """
    path = Path(os.path.expanduser(path))
    caution = None
    task: Task
    if not path.is_file():
        raise InputError(f"--task must name a text or a file of JSON lines, got {str(path)!r}, which is no file")
    if path.name.endswith(SUFFIXES):
        rows = rows_task(path, answer_tokens=_ANSWER, owner="kvsieve advise --task")
        task = rows
        caution = _caution(rows)
    else:
        task = _windows(path)
    return AdviceMaterial(path.name, (task,), tuple(chosen_tasks(PROBES)), len(TASKS), caution)


@dataclass(frozen=True)
class Windows(Generated):
    """Windows of a text for the model to continue: the loss needs no reference answer."""

    name: str = "text"
    title: str = "Windows of a text"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        start = rng.random()
        turn = QuestionAnswer(
            "Continue this text from where it ends.", ("",), lambda answer, expected: {"score": 1.0}, _ANSWER
        )

        def make(words: int) -> Sample:
            return Sample("".join(passage(self.text, start, words)).strip(), (turn,))

        return fit(make, count, length, self.name)[0]


def _windows(path: Path) -> Windows:
    return Windows(load_haystack(str(path)))


def _draw(task: Task, part: int, samples: int, length: int, seed: int, count: Count) -> list[Drawn]:
    if isinstance(task, DocumentTask):
        indices = _parts(task)[part % 2][:samples]
        return [Drawn(task.name, task.sample(index, length, seed, count)) for index in indices]
    own = _SEED + 10 * seed + part
    # Depths follow from the index, so they are drawn as well.
    indices = random.Random(f"{own}/{task.name}").sample(range(_INDICES), samples)
    return [Drawn(task.name, task.sample(index, length, own, count)) for index in indices]


def _parts(task: DocumentTask) -> tuple[list[int], list[int]]:
    """Return the questions used to choose a plan, and the held-out ones, from other documents if there are enough."""
    every = range(len(task))
    chosen, held_out = ([index for index in every if task.document(index) % 2 == part] for part in (0, 1))
    if min(len(chosen), len(held_out)) < _ENOUGH:
        chosen = [*every[::2]]
        held_out = [*every[1::2]]
    return chosen, held_out


def _caution(task: DocumentTask) -> str | None:
    """Return the limits of a small file of rows, or None if it has enough. Raises InputError for too few questions."""
    if len(task) < _LEAST:
        raise InputError(
            f"{task.title} has too few questions to choose a plan by some and state its loss by others: got "
            f"{len(task)}, expected at least {_LEAST}; add questions, about this document or others"
        )
    chosen, held_out = _parts(task)
    documents = [{task.document(index) for index in part} for part in (chosen, held_out)]
    shared = documents[0] & documents[1]
    count = len(set.union(*documents))
    about = "one document" if count == 1 else f"{count} documents"
    questions = f"{len(task)} questions about {about}: some choose the plan, the others state its loss"
    few = "and little of other questions" if len(held_out) < _FEW else ""
    if shared:
        return f"{questions}; nothing is known of other documents {few}".rstrip()
    return f"{questions}; little is known of other documents" if len(held_out) < _ENOUGH else None
