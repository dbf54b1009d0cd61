"""Choice of the tokens of joined documents to prefill again, by the attention of the question over stored entries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.core.scoring import mass_of
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.edits import spans_of
from kvsieve.hf.cache.records import Turn
from kvsieve.hf.edit.moved import MovedEntries
from kvsieve.hf.edit.scattered import beside
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.join.documents import JoinTexts
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import AskedAttention, AskedJoin, Span
from kvsieve.planning.plans import Plan
from kvsieve.types import LayerContext


def choose_asked(
    model: AttachedModel,
    cache: SieveCache,
    texts: JoinTexts,
    question: Tensor,
    entries: MovedEntries,
    join: AskedJoin,
    end: int,
) -> list[Span]:
    """Return the columns to prefill again, in ascending order; `cache` then has the given entries.

    Args:
        model: the attached model.
        cache: of a join, in its turn.
        texts: of the join.
        question: int64 [1, M], tokens after them.
        entries: of the columns, the same ones in every head.
        join: chooses.
        end: column after the entries.
    """
    documents = texts.start, end
    ids = torch.cat([texts.ids[:, end:], question], 1)
    last = _attention(model, cache, question[:, -1:], entries, documents) if join.compares else None
    asked = _attention(model, cache, ids, entries, documents)
    sizes = texts.until(end)
    again = torch.zeros(end, dtype=torch.bool)
    words = texts.ids[0, texts.start : end], question[0]
    again[texts.start :] = join.choose(AskedAttention(asked, last, sizes, *words)).cpu()
    again[: texts.start + sizes[0]] = False
    return list(spans_of(again))


def _attention(model: AttachedModel, cache: SieveCache, ids: Tensor, entries: MovedEntries, documents: Span) -> Tensor:
    """Return the attention of tokens after the documents to these, float32 [layers, N]. ids: int64 [1, M]."""
    start, end = documents
    layers: list[Tensor] = []

    def note(ctx: LayerContext) -> None:
        # Columns of a join are slots: every head has an entry of each.
        mass = mass_of(ctx, 0)[0, :, start:end] / ctx.query.shape[2]
        layers.append(ctx.ranks.mean(mass.float().mean(0)))

    entries.fill(cache, end)
    size = end + ids.shape[1]
    request = PassRequest(Plan(name=model.plan.name), "prefill", last_chunk=False, on_layer=note)
    with beside(cache, Turn(number=cache.turn.number, start=end, prompt_end=size, length=size)):
        model.feed(cache, ids.to(model.model.device), None, request)
    return torch.stack([layer.to(layers[0].device) for layer in layers])
