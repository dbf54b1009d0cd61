"""Entries of all layers at other columns: those of one cache for an edit, of several for a join."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.cache import DenseStore, keep
from kvsieve.core.selection import pack_ragged
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.edit.entries import LayerEntries
from kvsieve.hf.edit.scattered import feed_spans
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan

# Tokens of a span that is prefilled in one pass with others.
_SHORT = 256


@dataclass(frozen=True)
class MovedEntries:
    """Entries of all layers by their new columns.

    Attributes:
        layers: by index.
        ragged: layers that store different numbers of entries per head.
        encoded: layers with encoded entries.
    """

    layers: dict[int, LayerEntries]
    ragged: frozenset[int]
    encoded: frozenset[int]

    @classmethod
    def of(
        cls,
        model: AttachedModel,
        parts: Sequence[tuple[SieveCache, Tensor]],
        fresh: Tensor,
        *,
        rotated: bool = True,
    ) -> MovedEntries:
        """Return the entries of caches, which do not change; see `LayerEntries.moved`.

        rotated: False if keys keep the positions that they have.
        """
        with model.facts.keeping_tables():
            layers = {
                index: LayerEntries.moved(
                    [(cache.sieve_layers[index].store, target) for cache, target in parts],
                    fresh,
                    functools.partial(model.facts.rotate, index) if rotated else _unrotated,
                )
                for index in parts[0][0].sieve_layers
            }
        stores = [(index, layer.store) for cache, _ in parts for index, layer in cache.sieve_layers.items()]
        ragged = frozenset(index for index, store in stores if store.is_ragged)
        return cls(layers, ragged, frozenset(index for index, store in stores if store.is_encoded))

    def divide_keys(self, start: int, end: int, temperature: float) -> None:
        """Divide the keys of columns from `start` to `end` by a temperature."""
        for part in self.layers.values():
            own = (part.column >= start) & (part.column < end)
            part.keys = torch.where(own[..., None], part.keys / temperature, part.keys)

    def prefill(
        self,
        model: AttachedModel,
        cache: SieveCache,
        ids: Tensor,
        spans: Sequence[tuple[int, int]],
        chunk: int | None = None,
        done: Callable[[int], None] | None = None,
        feed: Callable[[], None] | None = None,
    ) -> None:
        """Replace the entries of `spans` of columns by those of a prefill; `finish` is to follow.

        Each span sees the columns before it; short ones pass together. The plan does not act.

        Args:
            model: of the cache.
            cache: in a turn on which the plan does not act; its entries are replaced.
            ids: int64 [N].
            spans: ascending and half-open.
            chunk: tokens per forward pass, None for a span at once.
            done: called after each pass with the number of tokens of `spans` that are prefilled.
            feed: prefills the only span, with the entries before it in the cache; None for plain passes.
        """
        layers = cache.sieve_layers
        request = PassRequest(Plan(name=model.plan.name), "prefill", last_chunk=False)
        one_order = all(part.is_sorted for part in self.layers.values()) and not cache.producers
        prefilled = 0

        def note(tokens: int) -> None:
            if done is not None:
                done(prefilled + tokens)

        for group in _groups(spans, chunk if one_order and feed is None else 0):
            start, end = group[0][0], group[-1][1]
            size = sum(last - first for first, last in group)
            self.fill(cache, start)
            if len(group) > 1:
                feed_spans(model, cache, ids, group, {index: part.below(end) for index, part in self.layers.items()})
                note(size)
            elif feed is not None:
                feed()
                note(size)
            else:
                for first in range(start, end, chunk or size):
                    last = min(first + (chunk or size), end)
                    model.feed(cache, ids[None, first:last], None, request)
                    note(last - start)
            prefilled += size
            for index, part in self.layers.items():
                part.replace(group, layers[index].store)

    def finish(self, model: AttachedModel, cache: SieveCache, seen: int) -> None:
        """Let a cache have seen `seen` columns with these entries, in the form that its layers store."""
        layers = cache.sieve_layers
        self.fill(cache, seen)
        for index in self.ragged:
            store = layers[index].store
            real = torch.ones_like(store.index, dtype=torch.bool) if store.valid is None else store.valid
            layers[index].store = keep(store, pack_ragged(real.expand_as(store.index)))
        if model.plan.codec is not None:
            for index in self.encoded:
                layers[index].encode(model.plan.codec, ends_prompt=True)

    def fill(self, cache: SieveCache, seen: int) -> None:
        """Let a cache have seen `seen` columns, with the entries of those."""
        stores: dict[int, DenseStore] = {index: part.below(seen) for index, part in self.layers.items()}
        for index, layer in cache.sieve_layers.items():
            layer.store = stores[index]
            layer.num_seen = seen
            layer.view = None
            layer.state = {}
        cache.conversation.num_seen = seen


def _unrotated(keys: Tensor, distance: Tensor) -> Tensor:
    """Return keys as they are."""
    return keys


def _groups(spans: Sequence[tuple[int, int]], most: int | None) -> list[list[tuple[int, int]]]:
    """Return spans by pass: short ones together, up to `most` tokens, None for any number."""
    groups: list[list[tuple[int, int]]] = []
    size = 0
    for start, end in spans:
        short = end - start <= _SHORT
        if groups and short and size and (most is None or size + end - start <= most):
            groups[-1].append((start, end))
        else:
            groups.append([(start, end)])
            size = 0
        size = size + end - start if short else 0
    return groups
