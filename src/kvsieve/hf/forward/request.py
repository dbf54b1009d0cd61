"""The request of a driver for one pass, and the result of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kvsieve.hf.forward.tentative import Transaction
from kvsieve.types import ALONE, LayerContext, ModelFacts, Ranks, Selection

if TYPE_CHECKING:
    from kvsieve.hf.model.tables import RotaryTables
    from kvsieve.planning.plans import Plan


class StopForward(Exception):
    """Ends a forward pass early on purpose; the driver catches it."""


@dataclass(frozen=True)
class PassRequest:
    """A driver's request for one pass, beyond what the conversation tells.

    Attributes:
        plan: runs in place of the conversation's own plan; None for that one.
        phase: "prefill" for a part of a prompt, "decode" for tokens of an answer, given or generated; None for whatever
            the conversation is at: a prompt of a plain call of the model begins a turn.
        last_chunk: False for a leading chunk of a prompt, after which nothing acts but what acts on every chunk.
        on_layer: called in each layer, after its attention and before the plan acts, with all queries of the pass. What
            it returns stays stored there; None leaves everything.
        on_leave: called with a layer's index and with what would wait there of this pass for a propagator that acts at
            the end of the prompt; for the layers named to `attached`.
        chunk: tokens of each of the leading chunks that the pass takes together; None for a pass over one.
        tentative: the pass, over tokens of an answer, can be taken back, all of it or its last tokens; see Transaction.
    """

    plan: Plan | None = None
    phase: Literal["prefill", "decode"] | None = None
    last_chunk: bool = True
    on_layer: Callable[[LayerContext], Selection | None] | None = None
    on_leave: Callable[[int, tuple[Tensor, ...]], None] | None = None
    chunk: int | None = None
    tentative: bool = False

    def __post_init__(self) -> None:
        if self.tentative:
            object.__setattr__(self, "phase", "decode")


PLAIN = PassRequest()
CANDIDATES = PassRequest(tentative=True)


@dataclass
class PassResult:
    """Result of a pass.

    Attributes:
        hidden: [B, K, C], the decoder's output for the tokens that came through; None for a pass that was stopped, and
            where logits were asked for.
        logits: [B, keep, V] of the last columns, where they were asked for.
        chosen: tokens that a propagator of two passes chose among those offered.
        report: the propagator's report on its choice.
        transaction: takes back tokens of a tentative pass; None for others.
    """

    hidden: Tensor | None
    logits: Tensor | None
    chosen: Selection | None
    report: dict[str, Any]
    transaction: Transaction | None = None


@dataclass(frozen=True)
class ModelContext:
    """Facts about the attached model that every pass needs.

    Attributes:
        num_layers: decoder layers.
        layers: indices of those whose entries plans act on.
        facts: for evictors that ask for them.
        ranks: the processes that heads are divided among.
        tables: the model's rotary tables; None where they do not depend on the length of a sequence.
    """

    num_layers: int
    layers: tuple[int, ...]
    facts: ModelFacts | None = None
    ranks: Ranks = ALONE
    tables: RotaryTables | None = None
