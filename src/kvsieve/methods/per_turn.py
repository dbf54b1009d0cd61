"""An evictor's choice as a view: nothing is dropped, and each turn's answer attends to its own prompt's choice.

RocketKV-MT (arXiv 2502.14051, section 3.4) does so with its first stage; this is for any evictor that acts at the end
of a prompt. A turn's prompt attends to everything before it, then chooses among the entries of all turns by its own
question; its answer attends to those and itself. Saves time per token, not memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError
from kvsieve.methods.base import scored_by_name
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import ChunkedEvictor, DelegatingEvictor, Evictor, ProbingEvictor
from kvsieve.types import END_OF_PROMPT, LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class PerTurn(DelegatingEvictor, heads="own", is_view=True, query_aware=False):
    """Keep all KV, but let a turn's answer attend only to `base`'s choice: ``PerTurn(base=SnapKV(budget=0.1))``.

    base: an evictor that acts at the end of a prompt only, in every layer independently, without extra passes. Raises
    PlanError for another.
    """

    def __post_init__(self) -> None:
        if isinstance(self.base, (ProbingEvictor, ChunkedEvictor)):
            raise PlanError(
                f"PerTurn: {type(self.base).__name__} needs passes of its own over the prompt, which a view has not; "
                "use a base such as SnapKV(budget=0.1)"
            )
        if not isinstance(self.base, Evictor) or self.base.when != END_OF_PROMPT:
            raise PlanError(
                f"PerTurn: base must be an evictor that acts at the end of a prompt only, such as SnapKV(budget=0.1), "
                f"without every=; got {self.base!r}"
            )

        if self.base.traits.recuts:
            raise PlanError(
                f"PerTurn: {type(self.base).__name__} weighs layers against each other, so it has no view; use a base "
                "such as SnapKV(budget=0.1)"
            )

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        chosen = self.base.select(ctx, counts)
        if isinstance(chosen, dict):
            raise PlanError(f"PerTurn: {type(self.base).__name__} weighs layers against each other, so it has no view")
        return chosen


@register_method("perturn", title="Per-turn view", paper="", phase="end of prompt")
def perturn(
    budget: Budget | str | int | float = "10%",
    base: str = "snapkv",
    skip_layers: int | tuple[int, ...] | str = 0,
) -> Plan:
    """Keep all KV, but let this turn attend only to the entries `base` would have kept."""
    return Plan(evict=PerTurn(base=scored_by_name("perturn", base, budget, skip_layers, None)))
