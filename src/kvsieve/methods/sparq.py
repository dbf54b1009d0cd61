"""SparQ Attention: Bandwidth-Efficient LLM Inference (arXiv 2312.04985).

Logits are estimated from the r channels with the largest queries, at a temperature that compensates for the missing
ones. The k entries with the highest estimates are attended to exactly, and the attention estimated for all others goes
to the mean of all values. A second, channel-major copy of the keys is stored.

The defaults are those of RocketKV's comparison (arXiv 2502.14051): one choice per KV head, of channels by the sum of
``|q|`` over its query heads and of entries by the sum of their estimates; r and k follow from the budget, half for
each: r = D t / S, k = t / 2. The minimum is one channel: beyond S = D t the estimates cost more than half the budget.
``paper=True`` (`per_query_head=True, newest=False`) is the original, for one query head per KV head.

Differences from the original: r and k follow from one budget, half for each, where the paper sets both; the paper's
local window, a quarter of k, is not forced: `newest` forces the current entry instead, by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.page_recipe import PageRecipe, page_table, value_mean
from kvsieve.core.page_weights import best_entries, held_part, largest, largest_channels, page_softmax
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import torch
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.types import AttentionQueries


@register_method("sparq", title="SparQ", paper="arXiv 2312.04985", phase="decode", budget=512)
@dataclass(frozen=True, kw_only=True)
class SparQ(BudgetReader, static_shapes=True):
    """Read the entries with the highest attention, estimated from few channels; add the mean of all values.

    mean_value: blend in the mean of values, in layers that choose. per_query_head: a choice for each query head, not
    one for those that share a KV head.
    """

    mean_value: bool = True
    per_query_head: bool = False

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        channels = facts.dim * tokens // (facts.length + facts.new_tokens)
        return Setting(tokens, tokens // 2, 1, min(max(channels, 1), facts.dim))

    def recipe(self, setting: Setting) -> PageRecipe | None:
        if self.per_query_head:
            return None
        return PageRecipe(1, setting.count, self.newest, setting.channels, blend=self.mean_value)

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Setting) -> Choice:
        query = asked.query
        scale = asked.scale
        table = page_table(state, 1)
        table.update(kv_rows)
        count = min(setting.count, kv_rows.size)
        groups = query.shape[1]
        if self.per_query_head:
            query = query.to(score_dtype(query.dtype))
            # Each query head's own channels [X, G, r].
            channels = largest(query.abs(), setting.channels)
            chosen = query.gather(2, channels)
            chosen = chosen * (scale / held_part(chosen, query).sqrt())
            rows = table.rows(channels.flatten(1), kv_rows.size)
            metadata_bytes = rows.nbytes
            rows = rows.to(query.dtype).unflatten(1, (-1, setting.channels))
            logits = (chosen[:, :, None] @ rows)[:, :, 0]
        else:
            weights, at = largest_channels(query, setting.channels, scale, table.halves)
            logits, metadata_bytes = table.scores(weights, at, kv_rows)
        estimates = page_softmax(logits, kv_rows.size, 1, kv_rows.length, asked)
        summed = estimates.clone() if self.per_query_head else estimates.sum(1)
        entries = best_entries(summed, kv_rows.size, 1, count, self.newest, kv_rows.length)
        blend = None
        if self.mean_value:
            if asked.sinks is not None:
                # Shares among entries alone.
                estimates = estimates / estimates.sum(-1, keepdim=True).clamp_min(torch.finfo(estimates.dtype).tiny)
            shares = estimates.gather(2, entries if self.per_query_head else entries[:, None].expand(-1, groups, -1))
            blend = shares.sum(-1), value_mean(state).update(kv_rows, score_dtype(query.dtype))
        return Choice(entries, blend, metadata_bytes)
