"""Threshold: evict the entries below a score (DMSPress of kvpress, after DMS, arXiv 2506.05345, without its training).

Entries whose score by another method, `base`, is below `threshold` are evicted, except the `recent` newest ones. How
many stay depends on the text and differs from head to head: there is no budget, unless `budget` sets a limit, within
which the best stay.

Differences from the reference: entries are removed, not masked; with `every=` the entries stored then are scored, where
kvpress scores tokens as they come and judges each once.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.methods.base import Wrapper, check_int, hide_padding, last_real, per_head, scored_by_name, skips
from kvsieve.methods.decoding import limited
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class Threshold(Wrapper, heads="own", ragged=True, query_aware=False):
    """Keep the entries with `base`'s scores at or above a threshold: ``Threshold(base=KNorm(budget=1.0), ...)``.

    base: ranks entries; its budget is the most entries per head, "100%" for no limit. threshold: least score of an
    entry that stays. recent: newest entries, always kept.
    """

    threshold: float
    recent: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "recent", self.recent, 1)
        self.budget.refuse_fewer(self.minimum, type(self).__name__, f"{self.minimum - 1} recent ones and one more")

    @property
    def minimum(self) -> int:
        return max(self.base.minimum, self.recent + 1)

    def entries(self, length: int, new_tokens: int = 0) -> int:
        return self.budget.entries(length, self.minimum)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        scores = hide_padding(ctx, self.base.scores(ctx))
        recent = per_head(last_real(ctx, self.recent), scores.shape[1])
        scores = scores.masked_fill(recent, float("inf"))
        return limited(self, ctx, scores, scores >= self.threshold, counts)


@register_method(
    "threshold", title="Threshold", paper="arXiv 2506.05345", phase="end of prompt", example={"threshold": 0.0}
)
def threshold(
    threshold: float,
    budget: Budget | str | int | float = "100%",
    base: str = "snapkv",
    recent: int = 128,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Evict the entries that another method, `base`, scores below a threshold, as many as that gives."""
    evictor = scored_by_name("threshold", base, budget, skip_layers, every)
    return Plan(evict=Threshold(base=evictor, threshold=threshold, recent=recent))
