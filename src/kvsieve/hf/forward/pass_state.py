"""The state of a forward pass under a plan: its facts, and data passed from layer to layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from kvsieve.attention import SharedChoices, Sharing
from kvsieve.core.checks import Value
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.forward.request import ModelContext, PassRequest
from kvsieve.hf.forward.travel import Arguments, Tokens
from kvsieve.planning.plans import Plan
from kvsieve.types import Selection, Step


class ComputedLayers(NamedTuple):
    """Layers that compiled calls have computed so far in a pass, each from the output of the one before.

    Attributes:
        number: of the layers, from the first one on.
        output: [B, L, C], of the last of them.
        angles: rotary tables that all were given.
    """

    number: int
    output: Tensor
    angles: Any


@dataclass
class PassState:
    """State of the forward pass in progress.

    Attributes:
        plan: acts on it.
        source: first layer after which hidden states may be dropped, or None.
        request: the driver's request.
        outer: the pass within which this one was begun.
        prepared: True until the decoder is entered, for a pass begun by a driver.
        stopped: the pass was ended early on purpose.
        chosen: the choice of a propagator of two passes.
        arguments: per-token arguments of decoder layers.
        lent: for layers with entries read by others, the layer at its attention, and this pass's keys.
        shared: ``ctx.shared``.
        hidden: [B, L, C], input of the current layer; kept only for evictors that need it.
        moved: True once other tokens travel than those of the pass.
        order: int64 [B, L], execution order of the pass's columns; None if unchanged.
        ids: int64 [B, columns], ids of the tokens up to the end of the pass; None unless needed.
        checks: values computed by the plan, not checked yet; see `core.checks`.
        selection: tokens that a propagator lets pass from the current layer; None for all.
        ahead: tokens of the answer that the same call of the model processes before this pass; see transaction.py.
        reads: counts of the pass's reads; the turn's, unless the pass may be undone.
        computed: layers computed ahead or in a row; None where a layer ran otherwise.
        choices: of stored entries, which layers after share.
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
    ids: Tensor | None = None
    checks: list[Value] = field(default_factory=list)
    ahead: int = 0
    selection: Selection | None = None
    computed: ComputedLayers | None = None
    choices: SharedChoices = field(default_factory=SharedChoices)

    def __post_init__(self) -> None:
        self.arguments = Arguments(self.step.num_new)
        self.reads = self.cache.turn.record.reads
        # Read in every layer.
        self.when = self.plan.when

    @property
    def end(self) -> int:
        """Columns fed after the pass."""
        return self.step.start + self.step.num_new

    def sharing(self, index: int, column: int = 0) -> Sharing | None:
        """Return a layer's part in sharing choices, for the token at `column`; None if every layer chooses."""
        reader = self.plan.read
        if reader is None or not reader.shares:
            return None
        where = index, self.model.num_layers
        heads = reader.heads_of_anchor(*where)
        return Sharing(self.choices, index, reader.anchor(*where), self.ahead + column, heads)

    @property
    def reads_as_answer(self) -> bool:
        """True if this pass's tokens attend as those of an answer."""
        if self.step.phase == "decode":
            return True
        reader = self.plan.read
        return reader is not None and reader.sparse_questions and not self.cache.turn.acts and self.step.start > 0

    @property
    def acts_in_between(self) -> bool:
        """True if the evictor acts in this pass, which does not end a prompt."""
        if self.step.phase == "prefill":
            return self.when.chunks and not self.step.ends_prompt
        return self.when.steps is not None and any(self.due)

    @property
    def due(self) -> tuple[bool, ...]:
        """Per row, True if an evictor that acts while decoding acts in this pass; a single value while rows agree.

        A row acts with its own tokens, and not again where only other rows have one.
        """
        step = self.step
        decoded = self.cache.turn.decoded + self.ahead + step.num_new
        due = self.due_after(decoded, step.lengths, step.mask is not None)
        valid = self.tokens.valid
        if valid is None or not any(due):
            return due
        return tuple(acts and real for acts, real in zip(due, valid[:, -1].tolist(), strict=True))

    def due_after(self, decoded: int, lengths: Sequence[int], padded: bool) -> tuple[bool, ...]:
        """Return the same for a token of an answer.

        Args:
            decoded: columns of the answer up to it.
            lengths: tokens of each row up to it.
            padded: the conversation has padding.
        """
        steps = self.when.steps
        if self.step.phase == "prefill" or steps is None:
            return ()
        if not padded:
            return (decoded % steps == 0,)
        # Rows with removed tokens have decoded fewer.
        pairs = zip(lengths, self.cache.conversation.prompt_lengths, strict=True)
        return tuple((length - prompt) % steps == 0 for length, prompt in pairs)
