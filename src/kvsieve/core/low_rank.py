"""Keys in their principal components, updated entry by entry."""

from __future__ import annotations

from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.pages import PageTable
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch


class LowRankKeys(PageTable):
    """Keys of KV rows projected on their first principal components, channel-major (Loki).

    The components are those of the first entries, fitted once: the eigenvectors of their covariance with the largest
    eigenvalues. Keys are projected without subtracting the mean, which shifts all scores of a query alike.

    Attributes:
        components: [X, D, r], the r principal components of each KV row; None before the first update.
    """

    def __init__(self, rank: int, fitted: int) -> None:
        super().__init__(1)
        self.rank = rank
        self.fitted = fitted
        self.components: Tensor | None = None

    def update(self, kv_rows: KVRows) -> None:
        if kv_rows.length is not None:
            self._take(kv_rows, kv_rows.length)
            return
        if self.size == kv_rows.size:
            return
        keys = kv_rows.keys_at(kv_rows.span(self.size, kv_rows.size))
        if self.components is None:
            self.components = principal_components(keys[:, : self.fitted], self.rank)
        self._add(self._projected(keys))

    def project(self, query: Tensor) -> Tensor:
        """Return queries [X, G, D] in the components, [X, G, r] in float32 at least."""
        assert self.components is not None
        dtype = score_dtype(query.dtype)
        return query.to(dtype) @ self.components.to(dtype)

    def keep_first(self, entries: int) -> None:
        super().keep_first(entries)
        if entries < self.fitted:
            self.size = 0
            self.components = None

    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors(), *(() if self.components is None else (self.components,)))

    def _projected(self, keys: Tensor) -> Tensor:
        return self.project(keys).to(keys.dtype)

    def _take(self, kv_rows: KVRows, length: DeviceLength) -> None:
        occupancy = length.occupancy(1, kv_rows.size)
        new = self._projected(kv_rows.keys_at(kv_rows.newest())).transpose(1, 2)[:, None]
        self.buffer.index_copy_(3, occupancy.newest, new)


def principal_components(keys: Tensor, rank: int) -> Tensor:
    """Return the first `rank` principal components of keys [X, N, D]: [X, D, rank], float32 at least, orthonormal."""
    keys = keys.to(score_dtype(keys.dtype))
    centered = keys - keys.mean(1, keepdim=True)
    vectors = torch.linalg.eigh(centered.transpose(1, 2) @ centered).eigenvectors
    return vectors[..., -rank:].flip(-1).contiguous()
