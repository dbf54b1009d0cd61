"""Several caches as the rows of one, for batched decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvsieve.cache import DenseStore
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import StoreLayer, WindowLayer
from kvsieve.hf.cache.states import CacheLayer, stacked_states


def can_stack(caches: Sequence[SieveCache]) -> bool:
    """Return True if `stack` supports them: same model, tokens seen and heads; none latent, encoded or a view.

    Documents in parallel are attended to one cache at a time.
    """
    first = caches[0]
    return all(
        cache.owner.decoder() is first.owner.decoder()
        and cache.num_seen == first.num_seen
        and cache.conversation.protected is None
        and cache.conversation.ends is None
        and cache.conversation.parallel is None
        and all(map(_alike, cache.all_layers, first.all_layers))
        for cache in caches
    )


def _alike(layer: CacheLayer, other: CacheLayer) -> bool:
    if layer.is_latent or layer.view is not None:
        return False
    memory = layer.memory
    other_memory = other.memory
    if memory is None or other_memory is None:
        return True
    return (
        not any(one.is_empty or one.is_encoded for one in (memory, other_memory))
        and memory.heads == other_memory.heads
        and (memory.score_rows() is None) == (other_memory.score_rows() is None)
    )


def stack(caches: Sequence[SieveCache], reserve: int = 0) -> SieveCache:
    """Return a cache with the rows of `caches`, which do not change.

    Shorter rows and heads get filler on the left.

    Args:
        caches: at least one, for which `can_stack` is true.
        reserve: entries to leave room for.
    """
    first = caches[0]
    stacked = first.with_layers(
        [_stacked(rows, reserve) for rows in zip(*(cache.all_layers for cache in caches), strict=True)]
    )
    conversation = stacked.conversation
    conversation.batch = sum(cache.conversation.batch for cache in caches)
    conversation.prompt_lengths = tuple(n for cache in caches for n in cache.conversation.prompt_lengths)
    if any(cache.conversation.mask is not None for cache in caches):
        conversation.mask = torch.cat([_mask(cache) for cache in caches])
    ids = [cache.conversation.ids for cache in caches]
    known = [part[:, : first.num_seen] for part in ids if part is not None]
    conversation.ids = torch.cat(known) if len(known) == len(ids) else None
    conversation.note_approximate(rule for cache in caches for rule in cache.conversation.approximate)
    conversation.edits = max((cache.conversation.edits for cache in caches), key=lambda edits: edits.share(edits.seen))
    for low, high in (cache.conversation.tables for cache in caches if cache.conversation.tables is not None):
        conversation.note_tables(low)
        conversation.note_tables(high)
    return stacked


def _stacked(layers: Sequence[CacheLayer], reserve: int) -> CacheLayer:
    """Return one layer's rows, without methods' state, which is for later turns."""
    out: Any = layers[0].fork(share=True)
    if out.memory is not None:
        out.store = DenseStore.stack([cast(StoreLayer, layer).store for layer in layers], reserve)
    if out.is_growing:
        out.state = {}
    if out.window is not None:
        out.holes = any(cast(WindowLayer, layer).holes for layer in layers)
    if out.has_state:
        out.set_states(stacked_states(layers))
    return out


def _mask(cache: SieveCache) -> Tensor:
    if cache.conversation.mask is not None:
        return cache.conversation.mask
    device = next(layer.store.keys.device for layer in cache.sieve_layers.values())
    return torch.ones(cache.conversation.batch, cache.num_seen, dtype=torch.bool, device=device)
