"""A package of somebody else's: methods that say by their traits what an engine must know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Evictor, PageBudget, PagedReader
from kvsieve.types import Selection


@register_method("own-evictor", title="Own", paper="example", phase="end of prompt", query_aware=False)
@dataclass(frozen=True, kw_only=True)
class LargestValues(Evictor, heads="own", query_aware=False, fixed_counts=True):
    """Keep the entries with the largest values."""

    budget: Budget = Budget(tokens=64)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))

    def select(self, ctx, counts: tuple[int, ...]) -> Selection | None:
        if counts[0] >= ctx.stored[0]:
            return None
        norms = ctx.values.float().norm(dim=-1)
        if ctx.protected is not None:
            norms = norms.masked_fill(ctx.protected, float("inf"))
        return Selection(norms.topk(counts[0]).indices.sort().values)


@register_method("own-reader", title="Own", paper="example", phase="decode", query_aware=False)
@dataclass(frozen=True, kw_only=True)
class AskedTogether(PagedReader, heads="own"):
    """Read the pages that a group's mean query asks for; entry by entry, the newest."""

    entries: int = 64

    def setting(self, facts: Any) -> int:
        return self.entries

    def reads_all(self, setting: int, size: int) -> bool:
        return size <= setting

    def choose(self, asked, kv_rows: KVRows, state, setting: int) -> Choice:
        return Choice(kv_rows.span(kv_rows.size - setting, kv_rows.size))

    def page_budget(self, setting: int) -> PageBudget:
        return PageBudget(setting)

    def question(self, query: Tensor, scale: float, page: int, channels: Tensor | None) -> Tensor:
        together = query.mean(2, keepdim=True).expand_as(query)
        return super().question(together, scale, page, channels)
