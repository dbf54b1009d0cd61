"""The state of a forward pass under a plan: its facts, and what goes from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvsieve.core.checks import Value
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.forward.request import ModelContext, PassRequest
from kvsieve.hf.forward.travel import Arguments, Tokens
from kvsieve.planning.plans import Plan
from kvsieve.types import Selection, Step, When


@dataclass
class PassState:
    """State of the forward pass in progress.

    Attributes:
        plan: what acts on it.
        source: first layer after which hidden states may be dropped, None where none are.
        request: what the driver said of the pass.
        outer: the pass within which this one was begun.
        prepared: True until the decoder is entered, for a pass that a driver has begun.
        stopped: the pass was ended early on purpose.
        chosen: what a propagator of two passes has chosen.
        arguments: per-token arguments of decoder layers.
        lent: of layers whose entries others read, the layer as it was when it attended, and this pass's keys.
        shared: ``ctx.shared``.
        hidden: [B, L, C], what enters the layer that runs; kept for evictors that need it only.
        moved: True once other tokens travel than those of the pass.
        order: int64 [B, L], the pass's columns as they run; None where they run in order.
        checks: values that the plan computed, not looked at yet; see `core.checks`.
        selection: tokens that a propagator lets go on from the layer that runs; None for all.
        ahead: tokens of the answer that the same call of the model runs before this pass; see transaction.py.
        reads: counts what the pass reads; the turn's, unless the pass may be taken back.
    """

    plan: Plan
    source: int | None
    cache: SieveCache
    step: Step
    tokens: Tokens
    model: ModelContext
    request: PassRequest
    outer: Any = None
    prepared: bool = False
    stopped: bool = False
    chosen: Selection | None = None
    lent: dict[int, tuple[StoreLayer, Tensor]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None
    moved: bool = False
    order: Tensor | None = None
    checks: list[Value] = field(default_factory=list)
    ahead: int = 0
    selection: Selection | None = None

    def __post_init__(self) -> None:
        self.arguments = Arguments(self.step.num_new)
        self.reads = self.cache.turn.record.reads
        # Asked in every layer.
        self.when = When() if self.plan.evict is None else self.plan.evict.when

    @property
    def end(self) -> int:
        """Columns fed once the pass is over."""
        return self.step.start + self.step.num_new

    @property
    def reads_as_answer(self) -> bool:
        """True where this pass's tokens read as those of an answer do."""
        if self.step.phase == "decode":
            return True
        reader = self.plan.read
        return reader is not None and reader.sparse_questions and not self.cache.turn.acts and self.step.start > 0

    @property
    def acts_in_between(self) -> bool:
        """True where the evictor acts in this pass, which does not end a prompt."""
        if self.step.phase == "prefill":
            return self.when.chunks and not self.step.ends_prompt
        return self.when.steps is not None and any(self.due)

    @property
    def due(self) -> tuple[bool, ...]:
        """Of each row, whether an evictor that acts while decoding acts in this pass; one for all while they agree."""
        step = self.step
        steps = self.when.steps
        if step.phase == "prefill" or steps is None:
            return ()
        if step.mask is None:
            return ((self.cache.turn.decoded + self.ahead + step.num_new) % steps == 0,)
        # Rows of which tokens were taken back have decoded fewer.
        pairs = zip(step.lengths, self.cache.conversation.prompt_lengths, strict=True)
        return tuple((length - prompt) % steps == 0 for length, prompt in pairs)
