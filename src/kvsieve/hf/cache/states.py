"""Layers of the cache with recurrent state, with or without entries, and empty layers.

transformers computes the state and writes to it in place, so every copy has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvsieve.attention import Window
from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.any_layer import AnyLayer
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer, WindowLayer
from kvsieve.hf.compat import DummyLayer, LinearAttentionLayer
from kvsieve.hf.kinds import STATE_FIELDS


class StateLayer(LinearAttentionLayer, AnyLayer):
    """Recurrent state of one layer: linear attention, a state space or a convolution."""

    has_state = True
    is_compileable = False
    is_croppable = False

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def states(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in STATE_FIELDS}

    def set_states(self, states: dict[str, Any]) -> None:
        """Restore the output of `states`; the tensors become this layer's own."""
        for name in STATE_FIELDS:
            setattr(self, name, states[name])
        first = next(tensors_in(states), None)
        if first is not None:
            self.dtype, self.device = first.dtype, first.device  # type: ignore[assignment]

    def fork(self, share: bool = False) -> Self:
        other = super().fork(share)
        vars(other).update(self.copied_states())
        return other

    def take_rows(self, layers: Sequence[AnyLayer]) -> None:
        every = [layer.states() for layer in layers]
        rows = {name: {at: _rows([state[name][at] for state in every]) for at in every[0][name]} for name in every[0]}
        self.set_states(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reorder(beam_idx)

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        for parts in self.states().values():
            for at, part in parts.items():
                if isinstance(part, Tensor):
                    parts[at] = part.index_select(0, rows.to(part.device))

    def reset(self) -> None:
        self.__init__(self.number_of_states)  # type: ignore[misc]


def _rows(parts: Sequence[Any]) -> Any:
    """Return row i of tensor i; values other than tensors are the same in all."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.stack([part[row] for row, part in enumerate(parts)])


class StateSieveLayer(StateLayer, SieveLayer):
    """Recurrent state, and all entries except those that the plan drops."""

    def __init__(self, number_of_states: int = 1) -> None:
        SieveLayer.__init__(self)
        StateLayer.__init__(self, number_of_states)


class StateWindowLayer(StateLayer, WindowLayer):
    """Recurrent state, and the entries of a window."""

    def __init__(self, number_of_states: int, window: Window) -> None:
        WindowLayer.__init__(self, window)
        StateLayer.__init__(self, number_of_states)

    def reset(self) -> None:
        self.__init__(self.number_of_states, self.window)  # type: ignore[misc]


class EmptyLayer(DummyLayer, AnyLayer):
    """A layer without content: it has no attention, or shares the entries of another."""

    def __init__(self, source: int | None = None) -> None:
        super().__init__()
        self.source = source
        self.is_initialized = False

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise CacheStateError("a layer that has no KV of its own stores some: this architecture is not supported")

    def get_max_length(self) -> int:
        return -1


CacheLayer = StoreLayer | StateLayer | EmptyLayer


def stacked_states(layers: Sequence[CacheLayer]) -> dict[str, Any]:
    """Return states as `StateLayer.states` does, with the layers' rows concatenated."""
    every = [layer.states() for layer in layers]
    return {name: {at: _stacked([states[name][at] for states in every]) for at in every[0][name]} for name in every[0]}


def _stacked(parts: list[Any]) -> Any:
    """Concatenate the rows of a state; values other than tensors are the same in all."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
