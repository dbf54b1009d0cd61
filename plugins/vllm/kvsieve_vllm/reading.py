"""Readers on an engine's pages: layers with sparse attention, and pages that a token attends to."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvsieve.errors import PlanError
from kvsieve.planning.roles.paged import PagedReader, ReadFacts
from kvsieve_vllm.options import EngineOptions

# Tokens of a request longer than any.
_LONGEST = 1 << 30


class PagesRead(NamedTuple):
    """Number of pages that a generated token attends to, entries in them, and key channels of their scores."""

    pages: int
    entries: int
    channels: int


@dataclass(frozen=True)
class PageReading:
    """A reader that acts on pages.

    Attributes:
        reader: chooses the pages.
        page: entries of a page.
        dim: channels of a key.
        num_layers: layers of the model.
        self_test: read every page.
    """

    reader: PagedReader
    page: int
    dim: int
    num_layers: int
    self_test: bool = False

    @classmethod
    def of(cls, options: EngineOptions, page: int, dim: int, num_layers: int) -> PageReading | None:
        """Return a plan's reader on pages; None if no layer attends sparsely."""
        if not isinstance(options.plan.read, PagedReader):
            return None
        reading = cls(options.plan.read, page, dim, num_layers, options.self_test)
        return reading if reading.layers else None

    def check(self) -> None:
        """Refuse pages that do not suit the reader.

        Raises:
            PlanError: they are not divisible into the reader's own, or too large for its budget; or layers differ.
        """
        name = type(self.reader).__name__
        own = self.reader.page
        if own is not None and self.page % own:
            raise PlanError(
                f"{name}: the engine's blocks of {self.page} entries cannot be divided into pages of {own}; give a "
                "page= that divides them, leave it out, or start vLLM with another block_size"
            )
        shortest, longest = ({self._setting(layer, length) for layer in self.layers} for length in (1, _LONGEST))
        if len(shortest) > 1 or len(longest) > 1:
            raise PlanError(
                f"{name}: layers differ in what they read, and the plugin reads as many blocks in all that read "
                "sparsely; use kvsieve's own server, `kvsieve serve`"
            )
        entries = self.reader.page_budget(longest.pop()).entries
        if entries < 2 * self.page:
            raise PlanError(
                f"{name}: its budget reads {entries} entries exactly, fewer than two of the engine's blocks of "
                f"{self.page}; raise budget= until it reads {2 * self.page}, or start vLLM with a smaller block_size"
            )

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers with sparse attention."""
        return tuple(layer for layer in range(self.num_layers) if self._setting(layer, _LONGEST) is not None)

    @property
    def everywhere(self) -> bool:
        """True if all layers have sparse attention."""
        return len(self.layers) == self.num_layers

    @property
    def parts(self) -> int:
        """Parts of a page with their own summaries."""
        return self.page // (self.reader.page or self.page)

    def read(self, length: int, size: int) -> PagesRead:
        """Return the pages read by a generated token.

        Args:
            length: tokens of the request; 0 for none, which reads one entry.
            size: its stored entries.
        """
        size = max(size, 1)
        setting = self._setting(self.layers[0], max(length, 1))
        budget = self.reader.page_budget(setting)
        count = used = -(-size // self.page)
        if not self.self_test and not self.reader.reads_all(setting, size):
            count = min(max(budget.entries // self.page, 2), used)
        channels = self.dim if budget.channels is None else min(budget.channels, self.dim)
        return PagesRead(count, (size - 1) % self.page + 1 + (count - 1) * self.page, channels)

    def _setting(self, layer: int, length: int) -> Hashable | None:
        return self.reader.setting(ReadFacts(layer, self.num_layers, length, 0, self.dim, self.page))
