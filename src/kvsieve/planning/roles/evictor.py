"""Evictors: choice of the KV entries that stay stored."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from kvsieve.planning.roles.base import Role, check_layers
from kvsieve.types import END_OF_PROMPT, LayerContext, Selection, When

if TYPE_CHECKING:
    from kvsieve.planning.budget import Budget

# Layers that keep everything: how many at the start, or which.
Layers = int | tuple[int, ...]


class Evictor(Role):
    """Chooses the KV entries that stay stored: at the end of a prompt, and at other times given by `when`.

    A subclass is a frozen dataclass with a field ``budget: Budget``, entries kept per layer and KV head, and a method
    `select`. Everything else has a safe default.
    """

    if TYPE_CHECKING:
        # A field of every subclass; a class attribute here would be taken for its default.
        @property
        def budget(self) -> Budget: ...

    @property
    def window(self) -> int:
        """Observation window: last queries of a prompt that it uses, all in the last chunk of a chunked prefill."""
        return 0

    @property
    def minimum(self) -> int:
        """Fewest entries it can keep: a smaller share of a prompt is raised to this, a smaller number refused."""
        return 1

    @property
    def when(self) -> When:
        """Times to act besides the end of a prompt; whether it observes passes."""
        return END_OF_PROMPT

    @property
    def why_not_edited(self) -> str | None:
        """Return a clause why tokens of a conversation cannot be removed or moved under it, or None."""
        if self.traits.writes:
            return "its entries have what was computed from several tokens"
        return "it has counted attention to tokens as they stood" if self.when.observes else None

    def why_not_joined(self, before: int) -> str | None:
        """Return a clause why documents that it has reduced alone cannot be joined, or None; see planning.joins.

        before: tokens before the documents, of which only those that the first document's heads keep remain.
        """
        return self.why_not_edited

    def rhythm(self, prompt: int) -> tuple[int, int] | None:
        """Return n and L: after a prompt of `prompt` tokens it acts at lengths L + k n. None: at its end only."""
        return None if self.when.steps is None else (self.when.steps, prompt)

    @property
    def grows(self) -> bool:
        """True if a share counts generated tokens while decoding; otherwise it stays that of the prompt."""
        return False

    @property
    def keeps_prompt(self) -> bool:
        """True if it evicts only the answer's entries while decoding; all others are then in ``ctx.protected``."""
        return False

    def answer_entries(self, generated: int, prompt: int, budget: int) -> int:
        """Return the entries of the answer that it keeps while decoding, if `keeps_prompt`.

        Args:
            generated: tokens of the answer so far.
            prompt: entries stored of everything before the answer, in the fullest head.
            budget: `entries` of the whole conversation.
        """
        return max(budget - prompt, self.minimum)

    @property
    def skip_layers(self) -> Layers:
        """Layers that keep everything: how many at the start, or which."""
        return 0

    @property
    def lacks_tokenizer(self) -> bool:
        """True while it needs a tokenizer for its own texts: its plan cannot prefill yet."""
        return False

    def for_tokenizer(self, tokenizer: Any) -> Self:
        """Return an evictor with its texts tokenized by this tokenizer of transformers."""
        return self

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        check_layers(self, "skip_layers", self.skip_layers, num_layers)

    def requested(self, length: int, new_tokens: int = 0) -> int:
        """Return the entries in the budget for a prompt of `length` tokens and `new_tokens` expected after it."""
        return self.budget.entries(length)

    def entries(self, length: int, new_tokens: int = 0) -> int:
        """Return the entries that it keeps of a prompt of `length` tokens, at least `minimum`; see `requested`."""
        return self.budget.entries(length, self.minimum)

    def stored_heads(self, kv_heads: int, query_heads: int) -> int:
        """Return the number of heads with their own entries after eviction, given the KV and query heads."""
        return kv_heads

    def observe(self, ctx: LayerContext) -> None:
        """Observe one layer in one pass, before `select` in the pass that acts; called if ``when.observes`` is set.

        ``ctx.query`` has all queries of the pass. Records in ``ctx.state`` must not depend on the ends of chunks.
        """

    @abstractmethod
    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        """Choose the slots to keep: [B, H, K] ascending with ``counts[b]`` real ones in row b; None keeps everything.

        Heads may keep different numbers (``Selection.head_lengths``), ``counts[b]`` on average. An evictor that weighs
        layers against each other returns a selection per layer index, of this layer and earlier ones, in slots stored
        at that moment; ``ctx.shared`` carries data from layer to layer.

        Called per layer, after its attention. Must not write to `ctx`, except to ``ctx.state`` and ``ctx.shared``.
        """

    def is_noop(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, Any]) -> bool:
        """Return True if `select` is known to drop nothing of a layer while decoding.

        A recorded pass is then not interrupted. False if unknown.

        Args:
            layer_idx: the layer.
            num_layers: of the model.
            stored: real entries of each row.
            state: the layer's ``ctx.state``.
        """
        return False


class ChunkedEvictor(Evictor):
    """An evictor that compresses a prompt during prefill, chunk by chunk, guided by the question at its end.

    Each pass processes [entries kept so far | chunk | question]. Then ``select(ctx, counts)`` chooses, per head,
    ``counts[b]`` entries of row b among all except the question's; the question is dropped, and the kept keys are
    re-rotated to the positions 0, 1, ... At the end the question is prefilled and stays, and the conversation continues
    from there.
    """

    if TYPE_CHECKING:
        # Fields of every subclass, as `budget` is.
        @property
        def question_tokens(self) -> int:
            """Tokens of the question at the prompt's end."""

        @property
        def chunk_length(self) -> int:
            """Tokens of a chunk."""
