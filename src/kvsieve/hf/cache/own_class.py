"""Caches for decoders of transformers that require their own cache class."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.owner import Owner
from kvsieve.hf.compat import own_cache_class


class LinearCache(SieveCache):
    """A SieveCache with the state of linear attention under MiniMaxCache's names."""

    def __len__(self) -> int:
        return len(self.layers)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return a layer's state, None before its first token."""
        layer: Any = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_state and layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep a layer's state."""
        self.update_recurrent_state(linear_cache, layer_idx)
        layer: Any = self.layers[layer_idx]
        layer.has_previous_state[0] = True


def new_cache(decoder: Any, config: Any, owner: Owner) -> SieveCache:
    """Return an empty cache of a class that the decoder accepts."""
    own = own_cache_class(decoder)
    return SieveCache(config, owner) if own is None else _joined(own)(config, owner)


@functools.cache
def _joined(own: type) -> type[SieveCache]:
    return type(f"Sieve{own.__name__}", (LinearCache, own), {})
