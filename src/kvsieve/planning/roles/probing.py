"""Evictors with extra passes over a prompt before it is complete: probe passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvsieve.planning.roles.evictor import Evictor
from kvsieve.types import LayerContext, Selection

if TYPE_CHECKING:
    from torch import Tensor

Observe = Callable[[LayerContext], None]
Compact = Callable[[LayerContext], Selection | None]


class Branch(Protocol):
    """A temporary copy of a partly prefilled conversation, for probe passes."""

    def read_rest(
        self, *, observe: Observe | None = None, evict: Evictor | None = None, logits: bool = False
    ) -> Tensor | None:
        """Prefill the rest of the prompt; then `evict`, if given, reduces the branch. See `feed`."""
        ...

    def feed(
        self,
        ids: Tensor,
        real: Tensor | None = None,
        *,
        observe: Observe | None = None,
        compact: Compact | None = None,
        logits: bool = False,
    ) -> Tensor | None:
        """Run a pass after the content of the branch.

        Args:
            ids: int64 [B, L].
            real: bool [B, L], False for padding; None without padding.
            observe: called per layer with its context; its last L entries are this pass's.
            compact: called per layer, before its attention, with the same context. Its result, the pass's own entries
                included, stays in the branch, and the pass attends to it; None keeps everything.
            logits: return the logits [B, V] after the last column, else None.
        """
        ...

    def branch(self) -> Branch:
        """Return a branch of this branch. This one must not be fed while that one is in use."""
        ...


class ProbePasses(Protocol):
    """A conversation with only the prompt's last tokens left to prefill, for an evictor to probe.

    Attributes:
        ids: int64 [B, N], the whole conversation.
        real: bool [B, N], False for padding.
        ends: end tokens of an answer.
    """

    ids: Tensor
    real: Tensor
    ends: frozenset[int]

    def branch(self) -> Branch:
        """Return a branch of the conversation. Only one may be in use at a time."""
        ...

    def state(self, layer_idx: int) -> dict[str, Any]:
        """Return the layer's ``ctx.state``, available to `select` at the end of the prompt."""
        ...


class ProbingEvictor(Evictor):
    """An evictor with temporary passes of its own before a prompt is complete.

    They run before the prompt's last ``max(1, window)`` tokens, and only if entries must be dropped: a `select` without
    the results of probing keeps everything. They do not run for a question on joined documents that it has reduced
    before. Such a plan needs a driver (``sieve.generate``, ``sieve.prefill``) and cannot be combined with propagation.
    """

    @property
    @abstractmethod
    def probe_tokens(self) -> int:
        """Most tokens per probe pass, for which room is reserved."""

    def probe_length(self, length: int) -> int:
        """Return the most tokens that probing adds to a branch of a conversation of `length` tokens."""
        # A request is shorter than a prompt.
        return min(self.probe_tokens, 2 * length)

    @property
    def probe_identity(self) -> ProbingEvictor:
        """Evictor that equals others if their probing of a prompt leaves the same states."""
        return self

    @abstractmethod
    def probe(self, passes: ProbePasses) -> None:
        """Feed passes to branches of the conversation, and store the input of `select` in the layers' states."""
