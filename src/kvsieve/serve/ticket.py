"""A request in the scheduler: its order, and the events of its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kvsieve.decoding.asked import AnswerPart, Sampling
from kvsieve.errors import KvsieveError
from kvsieve.hf.generate.grammar import CompiledGrammar
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.planning.drafts import Draft
from kvsieve.planning.plans import Plan
from kvsieve.serve.parsers.form import AnswerForm, ReasoningTokens


class BusyError(KvsieveError):
    """The server is full. retry_after: seconds after which to retry."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosingError(BusyError):
    """The server is closing, and had no time left for a request."""


class StoppedError(KvsieveError):
    """The scheduler's thread has ended, so no request can be answered."""


class TooLargeError(KvsieveError):
    """A request that never fits this server's memory."""


@dataclass(frozen=True)
class DocumentCounts:
    """Tokens of joined documents.

    Attributes:
        join: text form of the join.
        found: tokens from the store.
        prefilled: tokens prefilled alone.
        reread: tokens prefilled again in their places.
    """

    join: str
    found: int
    prefilled: int
    reread: int


@dataclass(frozen=True)
class Summary:
    """Costs of a request; its last event.

    Attributes:
        prompt_tokens: of the prompt.
        cached_tokens: of those, from the store.
        new_tokens: of all answers.
        stats: of the first answer; its drafts are those of all.
        kept: share of layers and heads that kept each part of the prompt, if a map was requested.
        seconds: from the request to its end.
        ttft_s: from the request to the first token.
        queued_s: from the request to the begin of its prefill.
        reasoning_tokens: of all answers; None if they are not counted.
        documents: of the prompt; None without any.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    stats: Stats | None
    kept: tuple[float, ...] = ()
    seconds: float = 0.0
    ttft_s: float = 0.0
    queued_s: float = 0.0
    reasoning_tokens: int | None = None
    documents: DocumentCounts | None = None


Event = AnswerPart | Summary | Exception


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of a prompt.

    Attributes:
        inputs: of the model, by name, as its processor makes them; pixels among them.
        tokens: the prompt's tokens with those of images replaced by negative numbers of the images' content, so that
            equal prefixes have equal images.
        end: tokens of the prompt up to the last one of an image.
        key: of the prompt up to there.
    """

    inputs: Mapping[str, Tensor]
    tokens: tuple[int, ...]
    end: int
    key: bytes


@dataclass(frozen=True)
class PromptDocuments:
    """Documents of a prompt.

    Attributes:
        before: the prompt's tokens before the first one.
        texts: tokens of each document.
        join: text form of the join.
    """

    before: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    join: str

    @property
    def end(self) -> int:
        """Tokens of the prompt up to the end of the last document."""
        return len(self.before) + sum(map(len, self.texts))

    @property
    def copied(self) -> int:
        """Tokens of the caches that documents are prefilled in, each after those before the first one."""
        return 0 if self.join == "full" else sum(len(self.before) + len(text) for text in set(self.texts))


@dataclass(frozen=True)
class Order:
    """A checked request.

    Attributes:
        ids: the prompt's token ids.
        plan: of the prompt.
        max_tokens: of an answer.
        sampling: rules.
        answers: their number.
        stops: texts that end an answer and are not part of it.
        stop_ids: tokens that end an answer.
        constraints: on the prompt.
        owner: of the request.
        session: conversation to continue; None for none.
        bins: parts of the prompt in the map of kept entries; 0 for none.
        ignore_eos: generate `max_tokens` regardless of end tokens.
        notes: sent with the answer, besides the notes of its statistics.
        continues: the answer continues the prompt's text, so it may begin with a space.
        echo: text before the answers in the reply.
        form: how the answers are split into text, reasoning and tool calls.
        shown: control tokens that are part of the answers' text, for the form.
        reasoning: tokens around reasoning; None if it is not counted.
        progress: report the progress of the prefill.
        draft: source of drafts of the answers; None for none.
        grammar: that every answer matches; None for none.
        images: of the prompt; None for text.
        edits: edit the stored conversation if the prompt does not continue it.
        chain: name of the chain of stored responses that a request without a session belongs to; None for none.
        documents: that the prompt's first user message begins with, prefilled alone; None for none.
    """

    ids: tuple[int, ...]
    plan: Plan
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    answers: int = 1
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    constraints: PromptConstraints = field(default_factory=PromptConstraints)
    owner: str = ""
    session: str | None = None
    bins: int = 0
    ignore_eos: bool = False
    notes: tuple[str, ...] = ()
    continues: bool = False
    echo: str = ""
    form: AnswerForm = field(default_factory=AnswerForm)
    shown: frozenset[int] = frozenset()
    reasoning: ReasoningTokens | None = None
    progress: bool = False
    draft: Draft | None = None
    grammar: CompiledGrammar | None = None
    images: PromptImages | None = None
    edits: bool = False
    chain: str | None = None
    documents: PromptDocuments | None = None

    @property
    def known_ids(self) -> tuple[int, ...]:
        """The prompt as a store knows it: its token ids, and numbers of the images' content."""
        return self.ids if self.images is None else self.images.tokens


@dataclass(eq=False)
class Ticket:
    """A request in the scheduler.

    Attributes:
        order: the request.
        tell: called with events, in the scheduler's thread; the last one is a Summary or an error.
        wake: called when the ticket was cancelled.
        came: time of arrival, in seconds.
    """

    order: Order
    tell: Callable[[Event], None]
    wake: Callable[[], None]
    came: float = field(default_factory=time.perf_counter)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Free its memory at the next token border."""
        self._cancelled.set()
        self.wake()
