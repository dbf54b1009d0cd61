"""Readers that also choose among the pages of an engine, such as the blocks of vLLM's KV cache."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import ReadFacts
from kvsieve.lazy import Tensor, torch
from kvsieve.planning.roles.reader import Reader

__all__ = ["PageBudget", "PagedReader", "ReadFacts"]


@dataclass(frozen=True)
class PageBudget:
    """Entries that a token attends to in an engine's pages.

    Attributes:
        entries: read exactly. The engine reads as many whole pages as fit, at least two.
        channels: key channels in a page's score; None for all.
    """

    entries: int
    channels: int | None = None


class PagedReader(Reader):
    """A reader that can read whole pages of an engine, including the newest.

    ``ReadFacts.page`` is the entries of a page; all layers that read sparsely must have the same setting. A page is
    summarized, per KV head, by the maximum and minimum of each key channel, or by the sum of its keys, from which
    `question` computes the page's logit. The pages with the largest softmax weights, summed over the query heads of a
    KV head, are read.
    """

    @property
    def page(self) -> int | None:
        """Entries of a summarized page; an engine's page then scores as its best part. None: the engine's page."""
        return None

    @property
    def means(self) -> bool:
        """True if pages are summarized by the sums of their keys, not by bounds."""
        return False

    @property
    def newest(self) -> bool:
        """True if the newest page is always read; engines refuse a reader without it."""
        return True

    @property
    def per_query_head(self) -> bool:
        """True if each query head chooses separately; engines refuse such a reader."""
        return False

    @abstractmethod
    def page_budget(self, setting: Any) -> PageBudget:
        """Return the entries read under a `setting` that was made for pages."""

    def question(self, query: Tensor, scale: float, page: int, channels: Tensor | None) -> Tensor:
        """Return the weights of a page's summary in its logit; by default those of upper bounds, or of the mean key.

        Args:
            query: [requests, heads, groups, D].
            scale: factor of query-key products.
            page: entries of a summarized page.
            channels: int64 [requests], key channels used in each request, D for all; None: all in every request.

        Returns:
            float32 [requests, heads, groups, 2, D] for maximum and minimum, or [..., 1, D] for the sums, contiguous.
        """
        query = query.float()
        if self.means:
            return (query * (scale / page))[:, :, :, None].contiguous()
        return torch.stack([query.clamp(min=0), query.clamp(max=0)], 3).mul_(scale)
