"""Samples in plain text, which tasks give to the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Score = Callable[[str, tuple[str, ...]], dict[str, float]]
"""(the model's answer, what was expected) -> metrics in [0, 1], "score" among them: the one that tables show."""


@dataclass(frozen=True)
class QuestionAnswer:
    """A question and its answers.

    question: follows the context in the user's message; the whole message in a later turn.
    answers: references for `score`; may include wrong ones if the score uses them.
    score: the scoring function. max_new_tokens: longest answer. prefix: start of the answer, given to the model.
    spread: measure distances to full KV throughout the answer, not over its beginning; for long answers.
    golden: the answer in the conversation when a later turn follows (default: the answers, joined).
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
        right = ", ".join(self.answers) if self.golden is None else self.golden
        return f"{self.prefix} {right}".strip()


@dataclass(frozen=True)
class Sample:
    """One prompt: a long context and one or more questions about it.

    turns: one question; or several, asked one after another in one conversation, or, with `independent`, each on its
    own copy of the context ("shared context"). meta: JSON-ready values for plots, for example {"depth": 0.5}.
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
    whether a method sees the question when it chooses entries.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]: ...

    def sample(self, index: int, length: int, seed: int, count: Callable[[Sample], int]) -> Sample:
        """Return sample `index`, reproducibly, of at most `length` prompt tokens and close to it.

        count: returns the prompt tokens of a sample, chat template and question included.
        """
        ...

    def document(self, index: int) -> int:
        """Return the number of the document of sample `index`: samples of one document have the same `context`.

        Samples of one document run one after another and share its prefill.
        """
        ...
