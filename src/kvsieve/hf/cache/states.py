"""Layers of the cache that carry recurrent state, alone or beside entries, and layers that hold nothing of their own.

transformers computes the state and writes to it in place, so every copy has its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from kvsieve.attention import Window
from kvsieve.cache.base import tensors_in
from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer, WindowLayer
from kvsieve.hf.compat import DummyLayer, LinearAttentionLayer
from kvsieve.hf.kinds import STATE_FIELDS


class StateLayer(LinearAttentionLayer):
    """Recurrent state of one layer: linear attention, a state space or a convolution."""

    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def states(self) -> dict[str, Any]:
        """Return all that the state consists of, by the names transformers has for it."""
        return {name: vars(self)[name] for name in STATE_FIELDS}

    def set_states(self, states: dict[str, Any]) -> None:
        """Take up what `states` returned; the tensors become this layer's own."""
        for name in STATE_FIELDS:
            setattr(self, name, states[name])
        first = next(tensors_in(states), None)
        if first is not None:
            self.dtype, self.device = first.dtype, first.device  # type: ignore[assignment]

    def state_tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state."""
        yield from tensors_in(self.states())

    def all_tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from self.state_tensors()

    def fork(self, share: bool = False) -> Self:
        """Copy it; the state is never shared."""
        other = copy.copy(self)
        other._own_states()
        return other

    def _own_states(self) -> None:
        for name, parts in self.states().items():
            own = {at: part.clone() if isinstance(part, Tensor) else part for at, part in parts.items()}
            setattr(self, name, own)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for parts in self.states().values():
            for at, part in parts.items():
                if isinstance(part, Tensor):
                    parts[at] = part.index_select(0, beam_idx.to(part.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        first = next(self.state_tensors(), None)
        if first is not None:
            self.reorder_cache(torch.arange(len(first)).repeat_interleave(repeats))

    def reset(self) -> None:
        self.__init__(self.number_of_states)  # type: ignore[misc]


class _Both(StateLayer, StoreLayer):
    """Recurrent state beside entries, in one layer.

    Attributes:
        entries_kind: what keeps the entries.
    """

    entries_kind: type[StoreLayer]

    def all_tensors(self) -> Iterator[Tensor]:
        yield from self.state_tensors()
        yield from self.entries_kind.all_tensors(self)

    def fork(self, share: bool = False) -> Self:
        other = self.entries_kind.fork(self, share)
        other._own_states()
        return other

    def reorder_cache(self, beam_idx: Tensor) -> None:
        StateLayer.reorder_cache(self, beam_idx)
        self.entries_kind.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        StoreLayer.batch_repeat_interleave(self, repeats)


class StateSieveLayer(_Both, SieveLayer):
    """Recurrent state, and all entries less those that the plan drops."""

    entries_kind = SieveLayer

    def __init__(self, number_of_states: int = 1) -> None:
        SieveLayer.__init__(self)
        StateLayer.__init__(self, number_of_states)


class StateWindowLayer(_Both, WindowLayer):
    """Recurrent state, and the entries of a window."""

    entries_kind = WindowLayer

    def __init__(self, number_of_states: int, window: Window) -> None:
        WindowLayer.__init__(self, window)
        StateLayer.__init__(self, number_of_states)

    def reset(self) -> None:
        self.__init__(self.number_of_states, self.window)  # type: ignore[misc]


class EmptyLayer(DummyLayer):
    """A layer that holds nothing: it has no attention, or reads the entries of another.

    Attributes:
        source: index of the layer whose entries it reads, None for no attention.
    """

    def __init__(self, source: int | None = None) -> None:
        super().__init__()
        self.source = source
        self.is_initialized = False

    def all_tensors(self) -> Iterator[Tensor]:
        """No tensor."""
        yield from ()

    def fork(self, share: bool = False) -> Self:
        """Copy it."""
        return copy.copy(self)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise CacheStateError("a layer that has no KV of its own stores some: this architecture is not supported")

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Nothing to do."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to do."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing to do."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing to do."""


CacheLayer = StoreLayer | StateLayer | EmptyLayer
