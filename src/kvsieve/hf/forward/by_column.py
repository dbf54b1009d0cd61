"""Attention of tokens at any columns to entries stored in the order of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from kvsieve.attention import AttentionRequest, DenseEntries, Shown, attend
from kvsieve.attention.slices import between
from kvsieve.cache import DenseStore
from kvsieve.types import AttentionQueries

# Numbers of a mask at a time, and most queries that share one.
_ELEMENTS = 1 << 24
_QUERIES = 256
# Queries of neighbouring columns from which on they attend without a mask, like the last tokens of a prompt.
_RUN = 8


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
    outs = []
    for first, last, run in _parts(ends, max(16, min(_QUERIES, _ELEMENTS // store.size))):
        seen = ends[last - 1]
        sees = None if run else Shown((index[:seen] <= columns[first:last, None])[None, None])
        outs.append(attend(AttentionRequest(asked.part(slice(first, last)), between(stored, 0, seen), sees)))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _parts(ends: list[int], most: int) -> Iterator[tuple[int, int, bool]]:
    """Yield half-open parts of queries: runs of neighbouring columns (True), and up to `most` others.

    ends: of each query, the number of entries that it sees.
    """
    borders = [0, *(at for at in range(1, len(ends)) if ends[at] != ends[at - 1] + 1), len(ends)]
    start = 0
    for first, last in itertools.pairwise(borders):
        run = last - first >= _RUN
        if not run and last - start <= most:
            continue
        if first > start:
            yield start, first, False
        start = first
        if run:
            yield first, last, True
            start = last
    if start < len(ends):
        yield start, len(ends), False
