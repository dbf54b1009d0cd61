"""Choice of the tokens of joined documents to prefill again, by the attention of the question over stored entries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.core.scoring import mass_of
from kvsieve.core.selection import select_top
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.edits import spans_of
from kvsieve.hf.cache.records import Turn
from kvsieve.hf.edit.moved import MovedEntries
from kvsieve.hf.edit.scattered import beside
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import AskedJoin, Span
from kvsieve.planning.plans import Plan
from kvsieve.types import LayerContext


def choose_asked(
    model: AttachedModel, cache: SieveCache, ids: Tensor, entries: MovedEntries, join: AskedJoin, documents: Span
) -> list[Span]:
    """Return the columns of documents to prefill again, in ascending order; `cache` then has the given entries.

    Args:
        model: the attached model.
        cache: of a join, in its turn.
        ids: int64 [1, N], tokens of all columns and of the question after them.
        entries: of the columns, the same ones in every head.
        join: chooses.
        documents: columns among which it chooses; their end is that of the entries.
    """
    start, end = documents
    layers: list[Tensor] = []

    def note(ctx: LayerContext) -> None:
        # Columns of a join are slots: every head has an entry of each.
        mass = mass_of(ctx, 0)[0, :, start:end] / ctx.query.shape[2]
        layers.append(ctx.ranks.mean(mass.float().mean(0)))

    entries.fill(cache, end)
    size = ids.shape[1]
    request = PassRequest(Plan(name=model.plan.name), "prefill", last_chunk=False, on_layer=note)
    with beside(cache, Turn(number=cache.turn.number, start=end, prompt_end=size, length=size)):
        model.feed(cache, ids[:, end:], None, request)
    scores = join.scores(torch.stack([layer.to(layers[0].device) for layer in layers]))
    chosen = select_top(scores[None], (join.chosen(end - start),)).indices
    marked = torch.zeros(end, dtype=torch.bool)
    marked[chosen.flatten().cpu() + start] = True
    return list(spans_of(marked))
