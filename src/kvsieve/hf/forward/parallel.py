"""Attention over documents that were prefilled in parallel, at the same positions."""

from __future__ import annotations

import torch

from kvsieve.attention import AttentionRequest, DenseEntries, ScaledPart
from kvsieve.cache import LayerMemory
from kvsieve.hf.cache.records import ParallelDocuments
from kvsieve.types import AttentionQueries


def request_over(
    documents: ParallelDocuments, asked: AttentionQueries, store: LayerMemory
) -> AttentionRequest[DenseEntries, ScaledPart]:
    """Return the request of queries for attention to all entries, with the documents' log-sum-exp scaled.

    Args:
        documents: of the conversation.
        asked: queries of the last stored tokens.
        store: of the layer.
    """
    index = store.index
    slots = torch.arange(index.shape[2], device=index.device)
    own = slots[len(slots) - asked.query.shape[2] :, None]
    mask = (slots <= own)[None, None]
    if store.valid is not None:
        real = store.valid[:, :, None]
        mask = (mask & real.repeat_interleave(asked.query.shape[1] // real.shape[1], 1)) | (slots == own)
    part = (index >= documents.start) & (index < documents.end)
    stored = DenseEntries(store.keys, store.values, log_weight=store.log_weight)
    return AttentionRequest(asked, stored, ScaledPart(mask, part, documents.factor))
