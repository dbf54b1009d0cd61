"""Hybrid sparse attention (HSA), the second stage of RocketKV (arXiv 2502.14051), section 3.3 and algorithm 1.

Entries are estimated along the sequence and the head dimension: by the bounds of pages of P entries, in the k1 channels
with the largest queries of a group, using a page's greatest or least value by the sign of the queries' sum. Softmax
weights at SparQ's temperature, summed over the group, choose the k2 entries to attend to.

The budget t is the number of entries read per KV head and step, half of it for the estimate: with c = cap / t and cap
the most entries stored, P = ceil(sqrt(c)) (1 if that exceeds c), k1 = D P / c, k2 = t / 2.

Differences from the reference: the newest page is always read, up to its k2 / 2 newest entries (not with
`newest=False`, which ``paper=True`` sets); contexts within the budget are read whole; pages cover the stored entries,
in order; for c above D^2, P = ceil(c / D), so that one channel of every page is within the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.page_recipe import PageRecipe, page_table
from kvsieve.core.page_weights import entries_of_pages, held_part, largest_channels
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import PagedReader
from kvsieve.types import AttentionQueries


def stored_entries(length: int, new_tokens: int, tokens: int) -> int:
    """Return the most entries per KV head that RocketKV's adaptive split stores once all tokens have come.

    length: tokens of the prompt; new_tokens: after it, at most half of the result; tokens: t. With c = S / t the first
    stage compresses by c^r, r = min(0.2 + 0.06 log2 c, 0.8), the second by the rest.
    """
    total = length + new_tokens
    ratio = max(1.0, total / tokens)
    rate = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    return max(int(total / ratio**rate), min(2 * new_tokens, total))


def hsa_setting(stored: int, tokens: int, dim: int, page: int | None = None) -> Setting:
    ratio = max(1.0, stored / tokens)
    if page is None:
        # The minimum is one channel, which limits the number of pages.
        page = max(math.ceil(math.sqrt(ratio)), math.ceil(ratio / dim))
        page = 1 if page > ratio else page
    channels = min(max(int(dim * page / ratio), 1), dim)
    return Setting(tokens, max(tokens // 2, 1), page, channels)


@dataclass(frozen=True, kw_only=True)
class HSA(BudgetReader, PagedReader, static_shapes=True):
    """Attend to the entries with the highest estimates by pages' bounds in few channels.

    after_eviction: RocketKV's first stage has evicted, which P and k1 depend on.
    """

    after_eviction: bool = False

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        stored = facts.length + facts.new_tokens
        if self.after_eviction:
            stored = stored_entries(facts.length, facts.new_tokens, tokens)
        return hsa_setting(stored, tokens, facts.dim, facts.page)

    def recipe(self, setting: Setting) -> PageRecipe | None:
        return PageRecipe(setting.page, setting.count, self.newest, setting.channels)

    def question(self, query: Tensor, scale: float, page: int, channels: Tensor | None) -> Tensor:
        query = query.float()
        weights = query * scale
        if channels is not None:
            order = query.abs().sum(2).sort(dim=-1, descending=True, stable=True).indices
            chosen = query * (order.argsort(-1) < channels[:, None, None])[:, :, None]
            weights = chosen * (scale / held_part(chosen, query).sqrt())
        is_greatest = (query.sum(2) > 0)[:, :, None]
        return torch.stack([weights * is_greatest, weights * ~is_greatest], 3)

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Setting) -> Choice:
        table = page_table(state, setting.page)
        table.update(kv_rows)
        weights, at = largest_channels(asked.query, setting.channels, asked.scale, table.halves)
        scores, metadata_bytes = table.scores(weights, at, kv_rows)
        count = min(setting.count, kv_rows.size)
        entries = entries_of_pages(scores, kv_rows, setting.page, count, self.newest, asked)
        return Choice(entries, metadata_bytes=metadata_bytes)


@register_method("hsa", title="HSA", paper="arXiv 2502.14051", phase="decode")
def hsa(budget: Budget | str | int | float = 512) -> Plan:
    """Read entries ranked by page bounds in the query's largest channels: RocketKV's second stage alone."""
    return Plan(read=HSA(budget=Budget.parse(budget)))
