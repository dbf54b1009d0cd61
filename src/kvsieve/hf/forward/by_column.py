"""Attention of tokens at any columns to entries stored in the order of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.attention import AttentionRequest, DenseEntries, Shown, attend
from kvsieve.attention.slices import between
from kvsieve.cache import DenseStore
from kvsieve.types import AttentionQueries

# Numbers of a mask at a time, and most queries that share one.
_ELEMENTS = 1 << 24
_QUERIES = 256


def attend_by_column(asked: AttentionQueries, store: DenseStore, columns: Tensor) -> Tensor:
    """Attend with each query to the entries of columns up to its own.

    Args:
        asked: the queries, [1, Hq, L, D].
        store: real entries of one row, of the same columns in every head, ascending.
        columns: int64 [L], those of the queries, ascending.

    Returns:
        [1, Hq, L, Dv].
    """
    stored = DenseEntries(store.keys, store.values, log_weight=store.log_weight)
    index = store.index[0, 0]
    ends = torch.searchsorted(index, columns.to(index.dtype), right=True).tolist()
    size = max(16, min(_QUERIES, _ELEMENTS // store.size))
    outs = []
    for first in range(0, len(ends), size):
        part = slice(first, first + size)
        seen = ends[part][-1]
        mask = index[:seen] <= columns[part, None]
        outs.append(attend(AttentionRequest(asked.part(part), between(stored, 0, seen), Shown(mask[None, None]))))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)
