"""Clusters of keys by cosine similarity, built chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

from kvsieve.core.kv_rows import KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F


class KeyClusters:
    """Clusters of the keys of KV rows (ClusterKV).

    The first entries are `sinks`, in no cluster. The next, up to the end of the prompt, are clustered at once; later
    ones in chunks. Entries beyond the last full chunk are in no cluster.

    Attributes:
        size: entries that are sinks or clustered.
        centroids: [X, C, D], means of the clusters' keys; None before the first chunk.
        sizes: int64 [X, C], entries of each cluster.
        order: int64 [X, size - sinks], entries cluster by cluster.
    """

    def __init__(self, sinks: int, prompt: int, chunk: int, per_cluster: int, iterations: int) -> None:
        self.sinks = sinks
        self.prompt = prompt
        self.chunk = chunk
        self.per_cluster = per_cluster
        self.iterations = iterations
        self.size = 0
        self.centroids: Tensor | None = None
        self.sizes = self.order = torch.empty(0)
        # Clusters and entries after each chunk.
        self._ends: list[tuple[int, int]] = []

    def update(self, kv_rows: KVRows) -> None:
        """Cluster the entries of all full chunks before the newest entry."""
        while True:
            first = not self._ends
            start = self.sinks if first else self.size
            end = self.prompt if first else start + self.chunk
            if end >= kv_rows.size:
                return
            self._add(kv_rows.keys_at(kv_rows.span(start, end)), start)
            self.size = end

    def _add(self, keys: Tensor, start: int) -> None:
        centroids, labels = clusters(keys, max(keys.shape[1] // self.per_cluster, 1), self.iterations)
        sizes = torch.zeros(centroids.shape[:2], dtype=torch.int64, device=keys.device)
        sizes.scatter_add_(1, labels, torch.ones_like(labels))
        order = labels.argsort(dim=1, stable=True) + start
        centroids = centroids.to(keys.dtype)
        if self.centroids is None:
            self.centroids, self.sizes, self.order = centroids, sizes, order
        else:
            self.centroids = torch.cat([self.centroids, centroids], 1)
            self.sizes = torch.cat([self.sizes, sizes], 1)
            self.order = torch.cat([self.order, order], 1)
        self._ends.append((self.centroids.shape[1], start + keys.shape[1]))

    def read(self, query: Tensor, count: int) -> Tensor:
        """Return the first `count` entries of the clusters, in the order of the products of centroids and query.

        Args:
            query: [X, R, D], R choices per KV row.
            count: at most all clustered entries.

        Returns:
            int64 [X, R, count], cluster by cluster; of the last one its first entries.
        """
        assert self.centroids is not None
        dtype = score_dtype(query.dtype)
        scores = query.to(dtype) @ self.centroids.to(dtype).transpose(1, 2)
        best = scores.sort(dim=-1, descending=True, stable=True).indices
        sizes = self.sizes[:, None].expand_as(best)
        starts = sizes.cumsum(-1) - sizes
        ends = sizes.gather(-1, best).cumsum(-1)
        at = torch.arange(count, device=query.device).expand(*best.shape[:2], -1).contiguous()
        rank = torch.searchsorted(ends, at, right=True)
        cluster = best.gather(-1, rank)
        before = ends.gather(-1, rank) - sizes.gather(-1, cluster)
        place = starts.gather(-1, cluster) + at - before
        return self.order.gather(1, place.flatten(1)).view(place.shape)

    def keep_first(self, entries: int) -> None:
        """Forget all but the first `entries` entries; chunks that are not complete then are clustered again."""
        while self._ends and self._ends[-1][1] > entries:
            self._ends.pop()
        if not self._ends:
            self.size, self.centroids = 0, None
            self.sizes = self.order = torch.empty(0)
        elif self.centroids is not None:
            count, self.size = self._ends[-1]
            self.centroids, self.sizes = self.centroids[:, :count], self.sizes[:, :count]
            self.order = self.order[:, : self.size - self.sinks]

    def all_tensors(self) -> Iterator[Tensor]:
        if self.centroids is not None:
            yield from (self.centroids, self.sizes, self.order)


def clusters(keys: Tensor, count: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Cluster keys [X, N, D] by cosine similarity: k-means from `count` evenly spaced keys.

    Centroids are the means of their keys; one without keys stays. It ends when no key changes its cluster, or after
    `iterations`.

    Returns:
        Centroids [X, count, D], float32 at least, and the cluster of each key, int64 [X, N], ties to the lower one.
    """
    keys = keys.to(score_dtype(keys.dtype))
    rows, size, dim = keys.shape
    centroids = keys[:, torch.arange(count, device=keys.device) * size // count]
    units = F.normalize(keys, dim=-1)
    labels = torch.full((rows, size), -1, device=keys.device)
    for _ in range(iterations):
        before = labels
        labels = (units @ F.normalize(centroids, dim=-1).transpose(1, 2)).argmax(-1)
        if torch.equal(labels, before):
            break
        sums = torch.zeros_like(centroids).scatter_add_(1, labels[..., None].expand(-1, -1, dim), keys)
        counts = torch.zeros_like(centroids[..., :1]).scatter_add_(1, labels[..., None], torch.ones_like(keys[..., :1]))
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
    else:
        labels = (units @ F.normalize(centroids, dim=-1).transpose(1, 2)).argmax(-1)
    return centroids, labels
