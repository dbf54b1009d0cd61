"""Evictors that need passes of their own over a prompt before it is complete: probe passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvsieve.roles.evictor import Evictor
from kvsieve.types import LayerContext

if TYPE_CHECKING:
    from torch import Tensor

Observe = Callable[[LayerContext], None]


class Branch(Protocol):
    """A copy of a half-read conversation that passes are fed to; nothing of it survives the probing."""

    def read_rest(
        self, *, observe: Observe | None = None, evict: Evictor | None = None, logits: bool = False
    ) -> Tensor | None:
        """Read the rest of the prompt; then `evict`, if given, reduces the branch. See `feed`."""
        ...

    def feed(
        self, ids: Tensor, real: Tensor | None = None, *, observe: Observe | None = None, logits: bool = False
    ) -> Tensor | None:
        """Run a pass after what the branch holds.

        Args:
            ids: int64 [B, L].
            real: bool [B, L], False for padding; None when there is none.
            observe: called per layer with its context, whose last L entries are this pass's.
            logits: return the logits [B, V] after the last column, else None.
        """
        ...

    def branch(self) -> Branch:
        """Make a branch of this branch. Nothing may be fed to this one while that one is in use."""
        ...


class ProbePasses(Protocol):
    """A conversation of which only the prompt's last tokens are unread, for an evictor to probe.

    Attributes:
        ids: int64 [B, N], the whole conversation.
        real: bool [B, N], False for padding.
        ends: tokens that end an answer.
    """

    ids: Tensor
    real: Tensor
    ends: frozenset[int]

    def branch(self) -> Branch:
        """Make a branch of the conversation. Only one may be in use at a time."""
        ...

    def state(self, layer_idx: int) -> dict[str, Any]:
        """Return the layer's ``ctx.state``, which `select` reads once the prompt is complete."""
        ...


class ProbingEvictor(Evictor):
    """An evictor that needs passes of its own, which are then forgotten, before a prompt is complete.

    They come when all but the prompt's last ``max(1, window)`` tokens are read, and only where something must go: a
    `select` without what a probing left keeps everything. Such a plan needs a driver (``sieve.generate``,
    ``sieve.prefill``) and does not go with propagation.
    """

    @property
    @abstractmethod
    def probe_tokens(self) -> int:
        """Tokens that it feeds at once, at most, which room is left for."""

    @property
    def probe_identity(self) -> ProbingEvictor:
        """Evictor that equals others if their probing of a prompt leaves the same states."""
        return self

    @abstractmethod
    def probe(self, passes: ProbePasses) -> None:
        """Feed passes to branches of the conversation, and store the input of `select` in the layers' states."""
