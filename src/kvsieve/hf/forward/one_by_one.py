"""Several tokens of an answer in a pass each, if they cannot pass the layers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.snapshot import Snapshot
from kvsieve.hf.forward.request import PassResult
from kvsieve.hf.forward.tentative import Transaction
from kvsieve.planning.plans import Plan

# Runs a pass over ids [B, 1] with a mask of all columns, and returns logits of so many of its columns.
FeedOne = Callable[[Tensor, Tensor | None, int], PassResult]


def goes_one_by_one(cache: SieveCache, plan: Plan) -> bool:
    """Return True if tokens of an answer cannot pass the layers together.

    This is the case for layers with a recurrent state, and for evictors that drop entries of a layer after later ones
    have attended.
    """
    evictor = plan.evict
    return cache.has_state or (evictor is not None and evictor.traits.recuts and evictor.when.steps is not None)


def feed_one_by_one(
    feed: FeedOne, cache: SieveCache, ids: Tensor, mask: Tensor | None, logits: int, *, tentative: bool
) -> PassResult:
    """Run a pass over each token of ids [B, L]; arguments and result are those of one pass over all of them."""
    size = ids.shape[1]
    seen = cache.num_seen
    before = cache.moment
    snapshots = []
    results = []
    for layer in cache.all_layers if tentative else ():
        layer.make_way(size)
    for at in range(size):
        if tentative:
            snapshots.append(cache.snapshot())
        part = None if mask is None else mask[:, : seen + at + 1]
        results.append(feed(ids[:, at : at + 1], part, int(size - at <= logits)))
    hidden = [result.hidden for result in results if result.hidden is not None]
    found = [result.logits for result in results if result.logits is not None]
    return PassResult(
        None if logits else torch.cat(hidden, 1),
        torch.cat(found, 1) if found else None,
        None,
        results[-1].report,
        StepsTransaction(cache, snapshots, before) if tentative else None,
    )


class StepsTransaction(Transaction):
    """Passes over one token each, with a snapshot of the cache between them."""

    def __init__(self, cache: SieveCache, snapshots: Sequence[Snapshot], before: int) -> None:
        super().__init__(cache, len(snapshots), before)
        self._snapshots = snapshots

    def _check(self, counts: tuple[int, ...]) -> None:
        if min(counts) == max(counts):
            return
        evictor = self.cache.owner.plan.evict
        memories = [layer.memory for layer in self.cache.all_layers if layer.memory is not None]
        acts = evictor is not None and evictor.when.steps is not None
        if acts or any(memory.droppable < self.size for memory in memories):
            raise UnsupportedOptionError(
                f"rows accept different numbers of tokens, {list(counts)}, and {self.cache.owner.plan.name} has "
                "dropped or encoded entries meanwhile, on a model whose tokens go through the layers one by one: "
                "accept as many in all rows, or use one cache per row"
            )

    def _take_back(self, counts: tuple[int, ...]) -> None:
        cache = self.cache
        most = max(counts)
        states = [*(snapshot.layers for snapshot in self._snapshots), cache.all_layers]
        if most < self.size:
            cache.rollback(self._snapshots[most])
        if min(counts) == most:
            return
        drops = [most - count for count in counts]
        for index, layer in enumerate(cache.all_layers):
            layer.take_rows([states[count][index] for count in counts])
            if layer.memory is not None:
                layer.memory.drop_last(drops)
        device = next(part.device for layer in cache.all_layers for part in layer.all_tensors())
        cache.conversation.take_back(cache.num_seen - most, counts, device)
