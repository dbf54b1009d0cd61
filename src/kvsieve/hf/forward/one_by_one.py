"""Several tokens of an answer in a pass each, if they cannot pass the layers together or cannot be taken back alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.snapshot import Snapshot
from kvsieve.hf.forward.request import PassResult
from kvsieve.hf.forward.tentative import Transaction
from kvsieve.hf.forward.transaction import AnswerSession, PassTransaction
from kvsieve.planning.plans import Plan

# Runs a pass over ids [B, L] with a mask of all columns, and returns logits of so many of its columns.
Feed = Callable[[Tensor, Tensor | None, int], PassResult]
# Of each layer, what its `copied_states` returns.
States = Sequence[dict[str, Any]]


def keeps_alike(cache: SieveCache, plan: Plan) -> bool:
    """Return True if rows of a batch may be unable to keep different numbers of tokens of a pass."""
    return cache.has_state or plan.weighs_layers


def feed_one_by_one(
    feed: Feed, cache: SieveCache, ids: Tensor, mask: Tensor | None, logits: int, *, tentative: bool
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


def _check_alike(transaction: Transaction, counts: tuple[int, ...]) -> None:
    """Raise UnsupportedOptionError if rows differ and their entries cannot be taken back row by row."""
    if min(counts) == max(counts):
        return
    cache = transaction.cache
    memories = [layer.memory for layer in cache.all_layers if layer.memory is not None]
    acts = cache.owner.plan.when.steps is not None
    if acts or any(memory.droppable < transaction.size for memory in memories):
        raise UnsupportedOptionError(
            f"rows accept different numbers of tokens, {list(counts)}, and {cache.owner.plan.name} has "
            "dropped or encoded entries meanwhile, on a model whose tokens go through the layers one by one: "
            "accept as many in all rows, or use one cache per row"
        )


class StepsTransaction(Transaction):
    """Passes over one token each, with a snapshot of the cache between them."""

    def __init__(self, cache: SieveCache, snapshots: Sequence[Snapshot], before: int) -> None:
        super().__init__(cache, len(snapshots), before)
        self._snapshots = snapshots

    def _check(self, counts: tuple[int, ...]) -> None:
        _check_alike(self, counts)

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


class StatesTransaction(PassTransaction):
    """A pass over all tokens at once that has moved recurrent states: if some are undone, the others are fed again."""

    def __init__(
        self, session: AnswerSession, before: int, states: States, again: Callable[[tuple[int, ...]], object]
    ) -> None:
        """Prepare to undo a pass.

        Args:
            session: of the pass.
            before: as in Transaction.
            states: of the cache's layers before it.
            again: feeds the first tokens of each row.
        """
        super().__init__(session, before)
        self._states = states
        self._again = again

    def _check(self, counts: tuple[int, ...]) -> None:
        _check_alike(self, counts)

    def _take_back(self, counts: tuple[int, ...]) -> None:
        super()._take_back((0,) * len(counts))
        for layer, states in zip(self.cache.all_layers, self._states, strict=True):
            layer.set_states(states)
        if max(counts):
            self.cache.status = "ready"
            self._again(counts)
