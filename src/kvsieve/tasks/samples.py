"""Samples, which tasks hand to the evaluator, in plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Score = Callable[[str, tuple[str, ...]], dict[str, float]]
"""(the model's answer, what was expected) -> metrics in [0, 1], "score" among them: the one that tables show."""


@dataclass(frozen=True)
class QuestionAnswer:
    """One question and what counts as its answer.

    question: follows the context in the user's message; the whole message in a later turn.
    answers: what `score` compares with; a wrong one may be listed where the score knows what to do with it.
    score: the scoring function. max_new_tokens: longest answer. prefix: put into the model's mouth before it answers.
    spread: distances to full KV are taken throughout the answer, not over its beginning; for long answers.
    golden: the answer that stands in the conversation when a later turn follows; by default the answers, joined.
    """

    question: str
    answers: tuple[str, ...]
    score: Score
    max_new_tokens: int
    prefix: str = ""
    golden: str | None = None
    spread: bool = False

    @property
    def reply(self) -> str:
        """The right answer, as the assistant's message in a conversation."""
        right = ", ".join(self.answers) if self.golden is None else self.golden
        return f"{self.prefix} {right}".strip()


@dataclass(frozen=True)
class Sample:
    """One prompt: a long context and one or more questions about it.

    turns: one question; or several, asked one after another in one conversation, or, with `independent`, each on its
    own copy of the context ("shared context"). meta: what plots need, JSON-ready, for example {"depth": 0.5}.
    """

    context: str
    turns: tuple[QuestionAnswer, ...]
    system: str | None = None
    independent: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """A named source of samples.

    name: as on the command line. title: for tables and plots. modes: which of "visible" and "hidden" make sense:
    whether a method sees the question when it chooses what to keep.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]: ...

    def sample(self, index: int, length: int, seed: int, count: Callable[[Sample], int]) -> Sample:
        """Sample `index`, the same for the same arguments, of at most `length` prompt tokens and close to it.

        count: prompt tokens of a sample, chat template and question included.
        """
        ...

    def document(self, index: int) -> int:
        """Number of the document that sample `index` asks about: samples of one document have the same `context`.

        Samples of one document are run one after another, and the document is read once.
        """
        ...
