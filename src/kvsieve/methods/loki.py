"""Loki: Low-rank Keys for Efficient Sparse Attention (arXiv 2406.02542), algorithm 1.

Keys of a head lie near a space of few dimensions. Queries and keys, after rotary embedding, are projected on the keys'
first r principal components; the k entries with the largest products there are attended to exactly. A second copy of
the keys, in the components, is stored.

The budget t covers both, half each: r = D t / S and k = t / 2 for S entries, with at least one component. With `part`,
r is this share of D, and k = t (the paper: a quarter of the entries by a quarter of D). One choice per KV head, by the
sum of its query heads' softmax weights, or with `per_query_head` one for each.

Differences from the reference: components are fitted to each cache at the end of the prompt, by KV row, where the
reference calibrates them on a text; the copy has the r components only, beside the keys; the current entry is always
read, unless ``paper=True``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.low_rank import LowRankKeys
from kvsieve.core.page_weights import best_entries, page_softmax
from kvsieve.errors import PlanError, short
from kvsieve.lazy import torch
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.types import AttentionQueries


@dataclass(frozen=True)
class LokiSetting(Setting):
    """A setting with the number of entries that components are fitted to."""

    fitted: int = 0


@register_method("loki", title="Loki", paper="arXiv 2406.02542", phase="decode", budget=512)
@dataclass(frozen=True, kw_only=True)
class Loki(BudgetReader, static_shapes=True):
    """Read the entries with the highest logits, estimated in the keys' principal components.

    part: share of the components that estimates use, all of the budget being entries; None: half of the budget each.
    per_query_head: a choice for each query head, not one for those that share a KV head.
    """

    part: float | None = None
    per_query_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part is not None and not 0 < self.part <= 1:
            raise PlanError(f"Loki: part must be a share above 0 and at most 1, such as 0.25, got {short(self.part)}")

    def parameters(self, tokens: int, facts: ReadFacts) -> LokiSetting:
        if self.part is not None:
            return LokiSetting(tokens, tokens, 1, max(int(facts.dim * self.part), 1), fitted=facts.length)
        rank = facts.dim * tokens // (facts.length + facts.new_tokens)
        return LokiSetting(tokens, tokens // 2, 1, min(max(rank, 1), facts.dim), fitted=facts.length)

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: LokiSetting) -> Choice:
        if "keys" not in state:
            state["keys"] = LowRankKeys(setting.channels, min(setting.fitted, kv_rows.size))
        table: LowRankKeys = state["keys"]
        table.update(kv_rows)
        query = table.project(asked.query) * asked.scale
        channels = torch.arange(setting.channels, device=query.device).repeat(len(query), 1)
        logits, metadata_bytes = table.scores(query, channels, kv_rows)
        weights = page_softmax(logits, kv_rows.size, 1, kv_rows.length, asked)
        if not self.per_query_head:
            weights = weights.sum(1)
        count = min(setting.count, kv_rows.size)
        entries = best_entries(weights, kv_rows.size, 1, count, self.newest, kv_rows.length)
        return Choice(entries, metadata_bytes=metadata_bytes)
