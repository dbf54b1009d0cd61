"""Base of the cache's layers: common methods."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvsieve.attention import Window
from kvsieve.cache import LayerMemory, View
from kvsieve.cache.tensors import tensors_in


class AnyLayer:
    """Facts and copies common to all layers of a cache.

    Attributes:
        is_growing: stores all entries except those that the plan drops.
        is_latent: these are latents.
        has_state: carries recurrent state.
        window: its window or chunk, if it has one.
        source: index of the layer that it shares entries of, without its own.
        view: entries that this turn's answer attends to, if not all.
        saved: names of saved facts besides entries and state.
    """

    is_growing = False
    is_latent = False
    has_state = False
    window: Window | None = None
    source: int | None = None
    view: View | None = None
    saved: tuple[str, ...] = ()

    @property
    def memory(self) -> LayerMemory | None:
        """The entries; None for a layer that stores none."""
        return None

    def states(self) -> dict[str, Any]:
        """Return the whole recurrent state, by transformers' names."""
        return {}

    def copied_states(self) -> dict[str, Any]:
        """Return a copy of `states` that shares no memory with them."""
        return {
            name: {at: part.clone() if isinstance(part, Tensor) else part for at, part in parts.items()}
            for name, parts in self.states().items()
        }

    def set_states(self, states: dict[str, Any]) -> None:
        """Restore the output of `states`; the tensors become this layer's own."""

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the recurrent state."""
        yield from tensors_in(self.states())

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor; the first one has as many rows as the batch."""
        yield from self.state_tensors()
        if self.memory is not None:
            yield from self.memory.all_tensors()

    def fork(self, share: bool = False) -> Self:
        """Copy it; see SieveCache.fork. Recurrent state is never shared."""
        return copy.copy(self)

    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of row ``rows[i]``."""

    def take_rows(self, layers: Sequence[AnyLayer]) -> None:
        """Set the recurrent state: row i is that of ``layers[i]``."""

    def make_way(self, tokens: int) -> None:
        """Drop entries outside the window, so that nothing is dropped while `tokens` further tokens are stored."""

    def drop_unseen(self, *, at_once: bool) -> None:
        """Drop entries that no future token can see; unless `at_once`, only if there are many."""

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = next(self.all_tensors(), None)
        if first is not None:
            self.reorder(torch.arange(len(first)).repeat_interleave(repeats))
