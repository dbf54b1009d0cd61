"""Several caches as the rows of one, so that they decode together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvsieve.cache import DenseStore
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer


def can_stack(caches: Sequence[SieveCache]) -> bool:
    """Tell whether `stack` takes them: as many tokens seen, as many heads; plain layers, none ragged or a view."""
    first = caches[0]
    return all(
        cache.num_seen == first.num_seen
        and cache.conversation.protected is None
        and len(cache.sieve_layers) == len(cache.layers)
        and all(
            type(mine) is SieveLayer
            and not mine.store.is_ragged
            and mine.view is None
            and mine.store.heads == theirs.store.heads
            for mine, theirs in zip(cache.sieve_layers.values(), first.sieve_layers.values(), strict=True)
        )
        for cache in caches
    )


def stack(caches: Sequence[SieveCache], reserve: int = 0) -> SieveCache:
    """Make a cache whose rows are those of `caches`, which stay as they are. Shorter rows get filler on the left.

    Args:
        caches: at least one; `can_stack` says which.
        reserve: entries to leave room for.
    """
    first = caches[0]
    layers = []
    for index in range(len(first.layers)):
        layer = SieveLayer()
        layer.num_seen = first.num_seen
        layer.store = DenseStore.stack([_dense(cache, index) for cache in caches], reserve)
        layers.append(layer)
    stacked = first.with_layers(layers)
    conversation = stacked.conversation
    conversation.batch = sum(cache.conversation.batch for cache in caches)
    conversation.prompt_lengths = tuple(n for cache in caches for n in cache.conversation.prompt_lengths)
    if any(cache.conversation.mask is not None for cache in caches):
        conversation.mask = torch.cat([_mask(cache) for cache in caches])
    return stacked


def _dense(cache: SieveCache, index: int) -> DenseStore:
    store = cache.sieve_layers[index].store
    assert isinstance(store, DenseStore)
    return store


def _mask(cache: SieveCache) -> torch.Tensor:
    mask = cache.conversation.mask
    if mask is not None:
        return mask
    device = cache.sieve_layers[0].store.keys.device
    return torch.ones(cache.conversation.batch, cache.num_seen, dtype=torch.bool, device=device)
