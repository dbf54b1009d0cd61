"""One pass over the next tokens of several caches: linear layers process all together, attention each row alone.

Rows of one token each are a batch [B, 1]. If some have more, drafts for instance, the tokens of all rows lie side by
side, [1, T], without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.states import CacheLayer, stacked_states
from kvsieve.hf.compat import Cache
from kvsieve.hf.forward.session import Session


def joins(cache: SieveCache) -> bool:
    """Return True if a cache can be a row of such a pass: False if its decoder requires a class of its own."""
    return type(cache) is SieveCache and not cache.conversation.multi_axis_positions


class RowsCache(Cache):
    """A view of several caches of one row each for transformers, in a pass over the next tokens of all.

    Keys and values that layers store are staged here and passed to the rows by `RowsSession.each`. Recurrent states,
    which transformers computes, are joined for the pass, and returned after it.

    Attributes:
        caches: one per row.
        updated: index of the layer that has staged keys and values last.
        staged: the staged keys and values; None once passed on.
    """

    def __init__(self, caches: Sequence[SieveCache]) -> None:
        self.caches = caches
        self.updated = 0
        self.staged: tuple[Tensor, Tensor] | None = None
        Cache.__init__(self, layers=[_joined(layers) for layers in zip(*(c.all_layers for c in caches), strict=True)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(cache.num_seen for cache in self.caches)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        return True if layer_idx is None else super().has_previous_state(layer_idx, *args, **kwargs)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated = layer_idx
        self.staged = (key_states, value_states)
        return self.staged

    def give_states_back(self) -> None:
        """Copy the recurrent states after the pass to their rows."""
        layers: list[Any] = self.layers
        for index, layer in enumerate(layers):
            if layer.has_state:
                for row, cache in enumerate(self.caches):
                    own: Any = cache.all_layers[index]
                    joint = layer.states().items()
                    own.set_states({name: {at: _row(part, row) for at, part in parts.items()} for name, parts in joint})


def _row(part: Any, row: int) -> Any:
    return part[row : row + 1].clone() if isinstance(part, Tensor) else part


def _joined(layers: Sequence[CacheLayer]) -> CacheLayer:
    """Return one layer for transformers: states of all rows, or else the first row's."""
    first = layers[0]
    if not first.has_state:
        return first
    out: Any = first.fork(share=True)
    out.set_states(stacked_states(layers))
    return out


@dataclass
class RowsSession(Session):
    """State of a pass over rows with their own plans; as a session it is the first row's, without effect.

    Attributes:
        rows: a session for each row.
        together: the caches as transformers sees them.
        widths: tokens of each row, if they lie side by side; None for a batch of one token each.
    """

    rows: list[Session] = field(default_factory=list)
    together: RowsCache | None = None
    widths: list[int] | None = None
    _parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = field(default_factory=dict)

    def each(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Session, Tensor, Tensor, Tensor]]:
        """Yield every row's session with its part of the attention's inputs, after its cache got the staged entries."""
        together = self.together
        assert together is not None
        staged = together.staged
        together.staged = None
        queries = self.split(query, 2)
        hidden = None if self.hidden is None else self.split(self.hidden, 1)
        for number, row in enumerate(self.rows):
            if staged is not None:
                keys, values = (self._part(whole, number) for whole in staged)
                row.cache.update(keys, values, together.updated)
            row.hidden = None if hidden is None else hidden[number]
            yield row, queries[number], self._part(key, number), self._part(value, number)

    def split(self, whole: Tensor, tokens: int) -> Sequence[Tensor]:
        """Divide a tensor of the pass into its rows. tokens: the dimension of its tokens."""
        return whole.split(1) if self.widths is None else whole.split(self.widths, tokens)

    def joined(self, outs: Sequence[Tensor]) -> Tensor:
        """Return the attention outputs [B, Hq, L, D] of all rows as the layer expects them."""
        return torch.cat(list(outs), 0 if self.widths is None else 2)

    def _part(self, whole: Tensor, row: int) -> Tensor:
        """Return a row of a tensor, the same object for the same tensor: layers recognize staged inputs by identity."""
        known = self._parts.get(id(whole))
        if known is None or known[0] is not whole:
            known = self._parts[id(whole)] = whole, self.split(whole, 2)
        return known[1][row]
