"""Blocks of consecutive entries, each with the mean of the keys that represent it."""

from __future__ import annotations

from collections.abc import Iterator

from kvsieve.core.kv_rows import KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import CacheStateError
from kvsieve.lazy import Tensor, torch


class BlockRepresentatives:
    """Representative keys of blocks of KV rows (InfLLM).

    Args:
        sinks: first entries, in no block.
        block: entries per block.
        count: representatives of a block for each query head, those with the highest scores (KVRows.scores_at).
        window: entries between a block and the newest one, from which on its scores are complete.

    Attributes:
        keys: [X, G, C, D], means of the representatives of C blocks, float32 at least.
        size: first entries that are sinks or in a block.
    """

    def __init__(self, sinks: int, block: int, count: int, window: int) -> None:
        self.sinks = sinks
        self.block = block
        self.count = min(count, block)
        self.window = window
        self.size = sinks
        self.keys = torch.empty(0)

    def update(self, kv_rows: KVRows) -> None:
        """Add the blocks that the local window has left."""
        blocks = self._blocks(kv_rows.size)
        start = self.size
        end = self.sinks + blocks * self.block
        if end <= start:
            return
        scores = kv_rows.scores_at(kv_rows.span(start, end))
        if scores is None:
            raise CacheStateError(
                "blocks are represented by the entries that later queries attended to, and these entries were stored "
                "under a plan that did not observe that: prefill the conversation under this one"
            )
        best = scores.unflatten(2, (-1, self.block)).sort(dim=-1, descending=True, stable=True).indices
        first = torch.arange(start, end, self.block, device=best.device)
        keys = kv_rows.keys_at(best[..., : self.count] + first[:, None])
        keys = keys.to(score_dtype(keys.dtype)).mean(3)
        self.keys = torch.cat([self.keys, keys], 2) if start > self.sinks else keys
        self.size = end

    def keep_first(self, entries: int) -> None:
        """Forget the blocks that the local window has not left with the first `entries` entries."""
        blocks = self._blocks(entries)
        self.size = min(self.size, self.sinks + blocks * self.block)
        self.keys = self.keys[:, :, :blocks] if self.size > self.sinks else torch.empty(0)

    def _blocks(self, size: int) -> int:
        # The newest entry is read beside the window.
        return max(size - 1 - self.window - self.sinks, 0) // self.block

    def all_tensors(self) -> Iterator[Tensor]:
        yield self.keys
