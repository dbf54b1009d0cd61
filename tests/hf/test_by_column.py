"""Attention of tokens at scattered columns to entries stored in the order of columns."""

from __future__ import annotations

import pytest
import torch

from attend import asking
from kvsieve.cache import DenseStore
from kvsieve.hf.forward import by_column


@pytest.mark.parametrize("queries", [512, 3])
def test_each_query_sees_the_columns_up_to_its_own(queries, monkeypatch):
    monkeypatch.setattr(by_column, "_QUERIES", queries)
    monkeypatch.setattr(by_column, "_ELEMENTS", queries)
    numbers = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 40, 8, generator=numbers, dtype=torch.float64) for _ in range(2))
    query = torch.randn(1, 4, 20, 8, generator=numbers, dtype=torch.float64)
    # Some columns have no entry, and some queries have none of their own.
    stored = torch.randperm(60, generator=numbers)[:40].sort().values
    columns = torch.randperm(60, generator=numbers)[:20].sort().values.clamp_min(int(stored[0]))
    store = DenseStore.of(keys, values, stored.to(torch.int32).expand(1, 2, -1), None, (40,))
    found = by_column.attend_by_column(asking(query, 0.3, (None, None)), store, columns)
    logits = query @ keys.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    weights = logits.masked_fill(stored > columns[:, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(found, weights @ values.repeat_interleave(2, 1), atol=1e-12, rtol=1e-12)
