"""Exact top-k: the oracle of sparse decoding, as used by RocketKV (arXiv 2502.14051) and others.

Every stored key is scored, and each query head attends to its t best entries: the most attention mass that t entries
can have. The scores cost as much as dense attention, so this is an upper bound, not a saving; the budget counts entries
attended to, and the statistics also report those scored. The defaults are RocketKV's. `per_group=True`: one set per KV
head, by the softmax weights summed over its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap
from kvsieve.lazy import torch
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.types import AttentionQueries


@register_method("exacttopk", title="Exact top-k", paper="arXiv 2502.14051", phase="decode", budget=256)
@dataclass(frozen=True, kw_only=True)
class ExactTopK(BudgetReader, static_shapes=True):
    """Read the entries with the highest logits, computed over all entries: the oracle of sparse decoding.

    per_group: one set for the query heads of a KV head.
    """

    newest: bool = False
    per_group: bool = False

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        return Setting(tokens, tokens)

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Setting) -> Choice:
        keys = kv_rows.keys_at(kv_rows.span(0, kv_rows.size))
        query = asked.query
        dtype = score_dtype(asked.query.dtype)
        logits = query.to(dtype) @ keys.to(dtype).transpose(1, 2) * asked.scale
        if self.per_group:
            logits = cap(logits, asked)
        if kv_rows.length is not None:
            logits.masked_fill_(~kv_rows.length.real(kv_rows.size), float("-inf"))
        if self.per_group:
            norm = logits.logsumexp(-1, keepdim=True)
            if asked.sinks is not None:
                norm = torch.logaddexp(norm, asked.sinks[..., None].to(norm.dtype))
            logits = (logits - norm).logsumexp(1)
        if self.newest:
            last = kv_rows.newest()[0]
            logits.index_fill_(-1, last, float("inf"))
        best = logits.topk(setting.count, dim=-1).indices
        return Choice(best.sort(dim=-1).values, metadata_bytes=keys.nbytes)
