"""Base of the generated tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.fit import Count
from kvsieve.lab.tasks.haystack import draw
from kvsieve.lab.tasks.samples import Sample

BOTH = ("visible", "hidden")


@dataclass(frozen=True)
class Generated:
    """Base of tasks with generated samples. Subclasses implement `build`.

    text: the haystack's text. modes: see Task.
    """

    text: str
    name: str = ""
    title: str = ""
    modes: tuple[str, ...] = BOTH

    def sample(self, index: int, length: int, seed: int, count: Count) -> Sample:
        """See Task.sample. Raises InputError for a length that the task cannot be fitted to."""
        return self.build(draw(seed, self.name, length, index), index, length, count)

    def document(self, index: int) -> int:
        return index

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        raise NotImplementedError
