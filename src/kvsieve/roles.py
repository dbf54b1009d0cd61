"""The roles a plan is made of.

Role objects are frozen dataclasses: the object is the configuration. What belongs to a sequence lives on the cache.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvsieve.budget import Budget
from kvsieve.types import LayerContext, Selection, When


@runtime_checkable
class Evictor(Protocol):
    """Chooses which KV entries stay stored: once a prompt is complete, and at other times if `when` says so."""

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

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        """Slots that stay, [B, H, K] ascending with ``counts[b]`` real ones in row b, or None to keep everything.

        Called per layer, after its attention. Must not write to `ctx`, except to ``ctx.state``.
        """
        ...


@runtime_checkable
class Propagator(Protocol):
    """Chooses which hidden states go on to deeper layers while a prompt is read."""

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
