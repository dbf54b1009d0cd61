"""One request as the scheduler sees it: its orders, and the events of its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvsieve.errors import KvsieveError
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.plans import Plan
from kvsieve.serve.tools import CallForm


class BusyError(KvsieveError):
    """The server is full. retry_after: seconds after which it is worth asking again."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosingError(BusyError):
    """The server is closing, and a request was not begun or not read in the time that was left."""


class StoppedError(KvsieveError):
    """The scheduler's thread has ended, so no request is answered any more."""


class TooLargeError(KvsieveError):
    """A request that this server never has room for."""


@dataclass(frozen=True)
class Sampling:
    """Rules by which tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: least share of likelihood that is chosen among; None for what the checkpoint's generation_config says,
            as for the next three.
        top_k: most tokens that are chosen among, 0 for all.
        min_p: least likelihood, relative to the likeliest token's.
        repetition_penalty: divides logits of tokens that occurred, the prompt's too.
        presence_penalty: taken from logits of tokens that the answer has.
        frequency_penalty: the same, for each time.
        bias: added to logits, by token id.
        seed: of the draws; None for one drawn at random.
        logprobs: likeliest tokens to tell with each token; None tells no likelihood.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenLikelihood:
    """A token, and the logarithm of its likelihood before sampling rules."""

    id: int
    logprob: float


@dataclass(frozen=True)
class ChosenToken:
    """A token that was chosen.

    Attributes:
        own: it.
        top: the likeliest tokens.
        offset: characters of the answer before it.
    """

    own: TokenLikelihood
    top: tuple[TokenLikelihood, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class PromptProgress:
    """Progress of a prefill.

    Attributes:
        done: tokens whose KV exists, those from the store included.
        cached: tokens from the store.
        total: tokens of the prompt.
        seconds: since the prefill began.
    """

    done: int
    cached: int
    total: int
    seconds: float


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer.

    Attributes:
        answer: number of the answer, 0 to n - 1.
        text: may be empty, where a character is not complete yet.
        tokens: chosen since the last piece, where likelihoods were asked for.
        finish: "stop", "length", or None while the answer goes on.
        progress: of the prefill, in parts before the first token only.
    """

    answer: int
    text: str
    tokens: tuple[ChosenToken, ...] = ()
    finish: str | None = None
    progress: PromptProgress | None = None


@dataclass(frozen=True)
class Summary:
    """Costs of a request; its last event.

    Attributes:
        prompt_tokens: of the prompt.
        cached_tokens: of those, found in the store.
        new_tokens: of all answers.
        stats: of the first answer.
        kept: share of layers and heads that held each part of the prompt at its end, where a map was asked for.
        seconds: from the request to its end.
        ttft_s: from the request to the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    stats: Stats | None
    kept: tuple[float, ...] = ()
    seconds: float = 0.0
    ttft_s: float = 0.0


Event = AnswerPart | Summary | Exception


@dataclass(frozen=True)
class Order:
    """A request, checked.

    Attributes:
        ids: the prompt's token ids.
        plan: that it is read under.
        max_tokens: of an answer.
        sampling: rules.
        answers: how many.
        stops: texts that end an answer and are left out of it.
        stop_ids: tokens that end an answer.
        constraints: on the prompt.
        owner: whose request it is.
        session: conversation that it goes on with; None for a prompt of its own.
        bins: parts of the prompt in the map of what was kept; 0 for none.
        ignore_eos: go on to `max_tokens` whatever the model writes.
        notes: sent with the answer, beside the notes of its statistics.
        continues: the answer goes on with the prompt's text, so it may begin with a space.
        echo: text before the answers in the reply.
        calls: the way in which an answer calls tools; None where it is text alone.
        progress: report the progress of the prefill.
    """

    ids: tuple[int, ...]
    plan: Plan
    max_tokens: int
    sampling: Sampling = Sampling()
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
    calls: CallForm | None = None
    progress: bool = False


@dataclass(eq=False)
class Ticket:
    """A request on its way through the scheduler.

    Attributes:
        order: the request.
        tell: called with events, in the scheduler's thread; the last one is a Summary or an error.
        wake: called when the ticket was cancelled.
        came: when it came, in seconds.
    """

    order: Order
    tell: Callable[[Event], None]
    wake: Callable[[], None]
    came: float = field(default_factory=time.perf_counter)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for it any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Let what it takes be freed at the next token border."""
        self._cancelled.set()
        self.wake()
