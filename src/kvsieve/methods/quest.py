"""Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (arXiv 2406.10774).

Each page of entries stores the least and the greatest value of each key channel, which bound its logits: ``ub = sum_d
max(q_d * max_d, q_d * min_d)``. The entries of the pages with the highest bounds are attended to.

The defaults are those of RocketKV's comparison (arXiv 2502.14051): one set per KV head, by the softmax of the bounds
summed over its query heads, cut to the entry, with pages of ``2 S / t`` entries, so that bounds and exact reads take
half the budget each. ``paper=True`` is the original, `page=16, per_query_head=True, skip_layers=2`: a set per query
head, the whole budget for exact reads.

With `means=True` a page has the weight of its mean key, as in MoBA (arXiv 2502.13189): a bound sums the extremes of all
channels, which no entry of a long page may come close to.

Differences from the original: the newest page, which its kernel forces and its evaluation does not, is part of the
budget and at most half of the entries read: the newest of a longer page; the last page needed is read in part; budgets
below three pages are possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.page_recipe import PageRecipe, page_table
from kvsieve.core.page_weights import best_entries, entries_of_pages
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.methods.base import check_int
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import PagedReader
from kvsieve.types import AttentionQueries


@register_method("quest", title="Quest", paper="arXiv 2406.10774", phase="decode", budget=512)
@dataclass(frozen=True, kw_only=True)
class Quest(BudgetReader, PagedReader, static_shapes=True):
    """Read the pages of entries with the highest bounds on attention; evict nothing.

    page: entries per page, None to spend half the budget on bounds.
    per_query_head: a set for each query head, not one for those that share a KV head.
    means: weigh a page by the logit of its mean key, not by its bound.
    """

    page: int | None = None
    per_query_head: bool = False
    means: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page is not None:
            check_int(self, "page", self.page, 1)
            self._check_page(self.budget.tokens or self.page)

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        if self.page is not None:
            self._check_page(tokens, f" that {self.budget} of {facts.length + facts.new_tokens} tokens are")
            return Setting(tokens, tokens, self.page)
        return Setting(tokens, tokens // 2, math.ceil(2 * (facts.length + facts.new_tokens) / tokens))

    def _check_page(self, tokens: int, how: str = "") -> None:
        if self.page is not None and self.page > tokens:
            raise PlanError(
                f"Quest: a page of {self.page} entries does not fit the budget of {tokens}{how}; lower page= or raise "
                "budget="
            )

    def recipe(self, setting: Setting) -> PageRecipe | None:
        if self.per_query_head or self.means:
            return None
        return PageRecipe(setting.page, setting.count, self.newest)

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Setting) -> Choice:
        table = page_table(state, setting.page, self.means)
        table.update(kv_rows)
        scores, metadata_bytes = table.bound(asked.query.to(score_dtype(asked.query.dtype)) * asked.scale, kv_rows)
        count = min(setting.count, kv_rows.size)
        if self.per_query_head:
            # A cap is monotonic, so capped bounds are bounds, and each query head's order does not change.
            entries = best_entries(scores, kv_rows.size, setting.page, count, self.newest, kv_rows.length)
        else:
            entries = entries_of_pages(scores, kv_rows, setting.page, count, self.newest, asked)
        return Choice(entries, metadata_bytes=metadata_bytes)
