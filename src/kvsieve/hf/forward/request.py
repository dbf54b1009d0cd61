"""A driver's request for one pass, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from kvsieve.hf.forward.tentative import Transaction
from kvsieve.types import ALONE, LayerContext, ModelFacts, Ranks, Selection

if TYPE_CHECKING:
    from kvsieve.cache import DenseStore
    from kvsieve.hf.model.tables import RotaryTables
    from kvsieve.planning.plans import Plan


class StopForward(Exception):
    """Ends a forward pass early on purpose; the driver catches it."""


@dataclass(frozen=True)
class PassRequest:
    """A driver's request for one pass, beyond the state of the conversation.

    Attributes:
        plan: replaces the conversation's own plan; None for that one.
        phase: "prefill" for a part of a prompt, "decode" for tokens of an answer, given or generated; None for the
            conversation's state: a prompt of a plain call begins a turn.
        last_chunk: False for a leading chunk of a prompt, after which only the roles that act on every chunk act.
        on_layer: called in each layer, after its attention and before the plan acts, with all queries of the pass. Its
            result stays stored there; None keeps everything.
        before_attention: as `on_layer`, but called before the attention of a prompt's pass, with its entries stored:
            the pass attends to the result. A store as the result replaces the layer's: one row's real entries of the
            same columns in every head, ascending, of which each query sees those of columns up to its own.
        on_leave: called with a layer's index and this pass's data that would wait there for a propagator that acts at
            the end of the prompt; for the layers named to `attached`.
        chunk: tokens of each of the leading chunks that the pass covers; None for a single chunk.
        tentative: the pass, over tokens of an answer, can be undone fully or in its last tokens; see Transaction.
    """

    plan: Plan | None = None
    phase: Literal["prefill", "decode"] | None = None
    last_chunk: bool = True
    on_layer: Callable[[LayerContext], Selection | None] | None = None
    before_attention: Callable[[LayerContext], Selection | DenseStore | None] | None = None
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
        hidden: [B, K, C], the decoder's output for the remaining tokens; None for a stopped pass, and if logits were
            requested.
        logits: [B, keep, V] of the last columns, if requested.
        chosen: tokens that a propagator of two passes chose among the candidates.
        report: the propagator's report on its choice.
        transaction: undoes tokens of a tentative pass; None for others.
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
        layers: indices of those with entries that plans act on.
        facts: for evictors that need them.
        ranks: processes of tensor parallelism.
        tables: the model's rotary tables; None if they do not depend on the length of a sequence.
    """

    num_layers: int
    layers: tuple[int, ...]
    facts: ModelFacts | None = None
    ranks: Ranks = ALONE
    tables: RotaryTables | None = None
