"""Evictors: which KV entries stay stored."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from kvsieve.errors import PlanError
from kvsieve.roles.base import Role
from kvsieve.types import END_OF_PROMPT, LayerContext, Selection, When

if TYPE_CHECKING:
    from kvsieve.budget import Budget

# Layers that keep everything: how many at the start, or which.
Layers = int | tuple[int, ...]


class Evictor(Role):
    """Chooses which KV entries stay stored: once a prompt is complete, and at other times if `when` says so.

    A subclass is a frozen dataclass with a field ``budget: Budget``, entries kept per layer and KV head, and a method
    `select`. Everything else here has a default that does no harm.
    """

    if TYPE_CHECKING:
        # A field of every subclass; a class attribute here would be taken for its default.
        @property
        def budget(self) -> Budget: ...

    @property
    def window(self) -> int:
        """Queries at the prompt's end that it looks at; the last chunk of a chunked prefill holds at least these."""
        return 0

    @property
    def minimum(self) -> int:
        """Fewest entries it can keep: a smaller share of a prompt is raised to this, a smaller number refused."""
        return 1

    @property
    def when(self) -> When:
        """When it acts besides the end of a prompt, and whether it observes passes."""
        return END_OF_PROMPT

    def rhythm(self, prompt: int) -> tuple[int, int] | None:
        """Return n and L: after a prompt of so many tokens it acts at lengths L + k n. None: at its end only."""
        return None if self.when.steps is None else (self.when.steps, prompt)

    @property
    def skip_layers(self) -> Layers:
        """Layers that keep everything: how many at the start, or which."""
        return 0

    @property
    def lacks_tokenizer(self) -> bool:
        """True while it needs a tokenizer for its own texts: its plan then reads no prompt."""
        return False

    def for_tokenizer(self, tokenizer: Any) -> Self:
        """Return the evictor with the token ids that it lacks, made with a tokenizer of transformers."""
        return self

    def check(self, num_layers: int) -> None:
        """Raise PlanError for a model of `num_layers` decoder layers that it does not fit."""
        layers = self.skip_layers
        bad = [layer for layer in layers if not -num_layers <= layer < num_layers] if isinstance(layers, tuple) else []
        if bad or (isinstance(layers, int) and layers > num_layers):
            raise PlanError(
                f"{type(self).__name__}: skip_layers={layers} lies outside the model, which has {num_layers} layers"
                + (f": layers are {-num_layers}..{num_layers - 1}" if bad else "")
            )

    def requested(self, length: int, new_tokens: int = 0) -> int:
        """Entries that the budget asks for, of a prompt of `length` tokens; `new_tokens` are expected after it."""
        return self.budget.entries(length)

    def entries(self, length: int, new_tokens: int = 0) -> int:
        """Entries that it keeps of a prompt of `length` tokens, at least `minimum`; see `requested`."""
        return self.budget.entries(length, self.minimum)

    def stored_heads(self, kv_heads: int, query_heads: int) -> int:
        """Return the number of heads that store entries after it has acted, given the KV and query heads."""
        return kv_heads

    def observe(self, ctx: LayerContext) -> None:
        """Look at one layer in one pass, before `select` in the pass that acts; called where ``when.observes`` is set.

        ``ctx.query`` holds all queries of the pass. What it learns goes into ``ctx.state`` and must not depend on where
        chunks end.
        """

    @abstractmethod
    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        """Choose the slots that stay: [B, H, K] ascending with ``counts[b]`` real ones in row b; None keeps everything.

        Heads may keep different numbers (``Selection.head_lengths``), ``counts[b]`` on average. An evictor that weighs
        layers against each other returns a selection per layer index, of this layer and of earlier ones, whose slots
        are those they store at that moment; ``ctx.shared`` carries what it needs from layer to layer.

        Called per layer, after its attention. Must not write to `ctx`, except to ``ctx.state`` and ``ctx.shared``.
        """

    def is_noop(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, Any]) -> bool:
        """Return True if the host knows that `select` would drop nothing of a layer while decoding.

        A pass that was recorded need not stop for it then. False where it is not known.

        Args:
            layer_idx: the layer.
            num_layers: of the model.
            stored: real entries of each row.
            state: the layer's ``ctx.state``.
        """
        return False


class ChunkedEvictor(Evictor):
    """An evictor that reduces a prompt while it is read, chunk by chunk, in the light of the question at its end.

    Each pass reads [entries kept so far | chunk | question]. Then ``select(ctx, counts)`` chooses, per head,
    ``counts[b]`` entries of row b among all but the question's; the question is forgotten, and the kept keys are turned
    to the positions 0, 1, ... At the end the question is read for good, and the conversation goes on there.
    """

    if TYPE_CHECKING:
        # Fields of every subclass, as `budget` is.
        @property
        def question_tokens(self) -> int:
            """Tokens at the prompt's end that are its question."""

        @property
        def chunk_length(self) -> int:
            """Tokens of a chunk."""
