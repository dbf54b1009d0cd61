"""Several caches as the rows of one, so that they decode together."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from kvsieve.cache import DenseStore
from kvsieve.hf.cache.cache import SieveCache, SieveLayer


def can_stack(caches: Sequence[SieveCache]) -> bool:
    """Whether `stack` takes them: the same tokens seen, as many heads; none ragged, a view or transformers' own."""
    first = caches[0]
    return all(
        cache.num_seen == first.num_seen
        and cache.held is None
        and len(cache.sieve_layers) == len(cache.layers)
        and all(
            not mine.store.is_ragged and mine.view is None and mine.store.heads == theirs.store.heads
            for mine, theirs in zip(cache.sieve_layers.values(), first.sieve_layers.values(), strict=True)
        )
        for cache in caches
    )


def stack(caches: Sequence[SieveCache], reserve: int = 0) -> SieveCache:
    """A cache whose rows are those of `caches`, which stay as they are. Shorter rows get filler on the left.

    reserve: entries to leave room for.
    """
    first = caches[0]
    stacked = copy.copy(first)
    stacked.record, stacked.waiting = copy.deepcopy(first.record), []
    stacked.batch = sum(cache.batch for cache in caches)
    stacked.prompt_lengths = tuple(length for cache in caches for length in cache.prompt_lengths)
    if any(cache.mask is not None for cache in caches):
        stacked.mask = torch.cat([_mask(cache) for cache in caches])
    stacked.layers = []
    for index in range(len(first.layers)):
        layer = SieveLayer()
        layer.num_seen = first.num_seen
        layer.store = DenseStore.stack([cache.sieve_layers[index].store for cache in caches], reserve)
        stacked.layers.append(layer)
    return stacked


def _mask(cache: SieveCache) -> torch.Tensor:
    if cache.mask is not None:
        return cache.mask
    device = cache.sieve_layers[0].store.keys.device
    return torch.ones(cache.batch, cache.num_seen, dtype=torch.bool, device=device)
