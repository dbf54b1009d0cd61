"""ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression (arXiv 2412.03213).

The keys of a prompt are clustered per KV head by k-means with the distance 1 - cosine, one cluster for 80 entries; the
first 16 entries, attention sinks, are left out. During decode every 320 further entries are clustered by themselves, in
four clusters. A token attends to the sinks, to the clusters with the largest products of query and centroid (the mean
of its keys) until the budget is reached, the last one in part, and to the entries that are in no cluster yet.

The budget t is the number of entries read per KV head and step, sinks and entries without a cluster included; the
centroids are read on top. One choice per KV head, by the mean of its queries (the code's option "qavg"), or with
`per_query_head` one for each query head.

Differences from the reference: k-means starts from evenly spaced keys, not from random ones; entries without a cluster
count, and are at most half of the budget, so that a small budget has smaller chunks than 320; a chunk has one cluster
for 80 entries, at least one; clusters are not cached on another device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.clusters import KeyClusters
from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import torch
from kvsieve.methods.base import check_int
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.types import AttentionQueries


@dataclass(frozen=True)
class ClusterSetting(Setting):
    """A setting with the number of first entries: `sinks`, and those of the `prompt`. page: entries of a chunk."""

    sinks: int = 0
    prompt: int = 0


@register_method("clusterkv", title="ClusterKV", paper="arXiv 2412.03213", phase="decode", budget=1024)
@dataclass(frozen=True, kw_only=True)
class ClusterKV(BudgetReader):
    """Read the clusters of keys with centroids nearest to the query; evict nothing.

    sinks: first entries that are always read, at most a quarter of the budget. per_cluster: entries for one cluster.
    chunk_length: later entries that are clustered together. iterations: most steps of k-means. per_query_head: a choice
    for each query head, not one for those that share a KV head.
    """

    sinks: int = 16
    per_cluster: int = 80
    chunk_length: int = 320
    iterations: int = 20
    per_query_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "sinks", self.sinks, 0)
        for name in ("per_cluster", "chunk_length", "iterations"):
            check_int(self, name, vars(self)[name], 1)
        if not self.newest:
            raise PlanError(
                "ClusterKV: entries in no cluster yet are always read, so newest=False would do nothing; leave it out"
            )

    def parameters(self, tokens: int, facts: ReadFacts) -> ClusterSetting:
        sinks = min(self.sinks, tokens // 4)
        return ClusterSetting(tokens, tokens, min(self.chunk_length, tokens // 2), sinks=sinks, prompt=facts.length)

    def choose(
        self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: ClusterSetting
    ) -> Choice:
        if "clusters" not in state:
            # After an evictor the prompt has fewer entries.
            prompt = max(min(setting.prompt, kv_rows.size - 1), setting.sinks + 1)
            state["clusters"] = KeyClusters(setting.sinks, prompt, setting.page, self.per_cluster, self.iterations)
        table: KeyClusters = state["clusters"]
        table.update(kv_rows)
        query = asked.query
        if not self.per_query_head:
            query = query.to(score_dtype(query.dtype)).mean(1, keepdim=True)
        newest = kv_rows.size - table.size
        found = table.read(query, setting.count - setting.sinks - newest)
        ends = torch.cat([kv_rows.span(0, setting.sinks), kv_rows.span(table.size, kv_rows.size)], 1)
        entries = torch.cat([ends[:, None].expand(-1, found.shape[1], -1), found], -1)
        # As many centroids as there may be, which grows evenly from token to token.
        most = -(-kv_rows.size // self.per_cluster)
        metadata_bytes = len(query) * most * query.shape[-1] * kv_rows.keys.element_size()
        return Choice(entries if self.per_query_head else entries[:, 0], metadata_bytes=metadata_bytes)

    def granularity(self, setting: Setting) -> int:
        return self.per_cluster
