"""The roles a plan is made of.

Role objects are frozen dataclasses: the object is the configuration. What belongs to a sequence lives on the cache.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvsieve.budget import Budget
from kvsieve.types import LayerContext, Selection, When


@runtime_checkable
class Evictor(Protocol):
    """Chooses which KV entries stay stored: once a prompt is complete, and at other times if `when` says so.

    One that uses ``ctx.model`` says of what in an attribute ``needs: tuple[str, ...]``, "rotary" or "output_weight";
    a model that cannot give it is then refused. One whose ``when.looks`` is set is a Looker as well.
    """

    @property
    def budget(self) -> Budget:
        """Entries kept per layer and KV head."""
        ...

    @property
    def window(self) -> int:
        """Queries of the prompt's end it looks at; the last chunk of a chunked prefill holds at least these."""
        ...

    @property
    def minimum(self) -> int:
        """Fewest entries it can keep; a smaller ratio budget is raised to this, a smaller token budget refused."""
        ...

    @property
    def when(self) -> When:
        """When it acts besides the end of a prompt."""
        ...

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        """Slots that stay, [B, H, K] ascending with ``counts[b]`` real ones in row b, or None to keep everything.

        Heads may keep different numbers (``Selection.head_lengths``), ``counts[b]`` on average. An evictor that weighs
        layers against each other returns a selection per layer index, of this layer and of earlier ones, whose slots
        are those they store at that moment; ``ctx.shared`` carries what it needs from layer to layer.

        Called per layer, after its attention. Must not write to `ctx`, except to ``ctx.state`` and ``ctx.shared``.
        """
        ...


@runtime_checkable
class Looker(Protocol):
    """The part of an evictor that sees every pass of a prompt, chunks included, not its last `window` queries only."""

    def look(self, ctx: LayerContext) -> None:
        """Called per layer and pass, before `select` in the pass that acts; ``ctx.query`` is this pass's, all of it.

        What it learns goes into ``ctx.state`` and must not depend on where the chunks end.
        """
        ...


@runtime_checkable
class Propagator(Protocol):
    """Chooses which hidden states go on to deeper layers while a prompt is read.

    It may also have ``restarts = True``: then the pass ends where `select` first chooses, and the chosen tokens are
    read again as a prompt of their own; ``keeps(length: int) -> int`` tells how many those are. ``queries(length: int)
    -> int`` is for a `window` that depends on the prompt's length, and ``caution(num_layers: int) -> str | None`` for
    a warning when it is attached to a model.
    """

    @property
    def window(self) -> int:
        """Queries of the prompt's end it looks at; see Evictor.window."""
        ...

    def source(self, num_layers: int) -> int:
        """Index of the first layer after which hidden states may be dropped.

        Raises PlanError when the model of `num_layers` layers has no such layer.
        """
        ...

    def select(self, ctx: LayerContext) -> Selection | None:
        """Tokens that go on to the next layer, [B, K] ascending, the last one included; None lets all pass.

        Called at every layer in the pass that ends a prompt, after its attention and before its eviction; before
        ``source(num_layers)`` only to look. What it has seen goes into ``ctx.shared``. Offered are the last
        ``ctx.offered`` stored entries; indices count from the first of them.
        """
        ...
