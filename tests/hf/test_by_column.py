"""Attention of tokens at scattered columns to entries stored in the order of columns."""

from __future__ import annotations

import pytest
import torch

from attend import asking
from kvsieve.cache import DenseStore
from kvsieve.hf.forward import by_column


@pytest.mark.parametrize("neighbours", [(), ((5, 17), (30, 38)), ((0, 20),), ((20, 40),)])
@pytest.mark.parametrize("queries", [512, 3])
def test_each_query_sees_the_columns_up_to_its_own(queries, neighbours, monkeypatch):
    monkeypatch.setattr(by_column, "_QUERIES", queries)
    monkeypatch.setattr(by_column, "_ELEMENTS", queries)
    numbers = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 40, 8, generator=numbers, dtype=torch.float64) for _ in range(2))
    # Some columns have no entry, and some queries have none of their own.
    stored = torch.randperm(60, generator=numbers)[:40].sort().values
    columns = torch.randperm(60, generator=numbers)[:20].sort().values.clamp_min(int(stored[0]))
    if neighbours:
        # Queries of neighbouring entries, half of which have gaps between their columns.
        stored = torch.cat([torch.arange(20), torch.arange(20, 60, 2)])
        columns = stored[torch.cat([torch.arange(*run) for run in neighbours])]
    query = torch.randn(1, 4, len(columns), 8, generator=numbers, dtype=torch.float64)
    store = DenseStore.of(keys, values, stored.to(torch.int32).expand(1, 2, -1), None, (40,))
    found = by_column.attend_by_column(asking(query, 0.3, (None, None)), store, columns)
    logits = query @ keys.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    weights = logits.masked_fill(stored > columns[:, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(found, weights @ values.repeat_interleave(2, 1), atol=1e-12, rtol=1e-12)


def test_runs_of_neighbours_attend_without_a_mask():
    ends = [2, 4, *range(7, 20), 25, 27, 30, 31, *range(40, 48)]
    parts = [*by_column._parts(ends, 3)]
    assert parts == [(0, 2, False), (2, 15, True), (15, 17, False), (17, 19, False), (19, 27, True)]
