"""Loki: the components are those of the keys, and the entries those with the largest products there."""

from __future__ import annotations

import pytest
import torch

from attend import asking
from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.core.low_rank import LowRankKeys, principal_components
from kvsieve.errors import PlanError
from kvsieve.methods import Loki
from kvsieve.methods.loki import LokiSetting


def kv_rows_of(keys):
    size = keys.shape[1]
    return KVRows(keys.flatten(0, 1), keys.flatten(0, 1), None, torch.arange(len(keys)) * size, 1, size)


def test_principal_components_of_keys_on_two_axes():
    """Variance 4 along the first axis, 1 along the last, none between; the mean does not matter."""
    keys = torch.tensor([[[2.0, 5.0, 1.0], [-2.0, 5.0, 1.0], [2.0, 5.0, -1.0], [-2.0, 5.0, -1.0]]])
    found = principal_components(keys, 2)
    torch.testing.assert_close(found.abs(), torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]]))


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("newest", [False, True])
def test_entries_with_the_largest_products_in_the_components(per_query_head, newest):
    torch.manual_seed(0)
    query, keys = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 41, 6, dtype=torch.float64)
    fitted, rank, count, scale = 30, 2, 9, 0.3
    reader = Loki(budget=16, per_query_head=per_query_head, newest=newest)
    setting = LokiSetting(16, count, 1, rank, fitted=fitted)
    found = reader.choose(asking(query, scale), kv_rows_of(keys), {}, setting).entries
    for row in range(2):
        part = keys[row, :fitted] - keys[row, :fitted].mean(0)
        basis = torch.linalg.svd(part).Vh[:rank].T
        weights = ((query[row] @ basis) @ (keys[row] @ basis).T * scale).softmax(-1)
        if newest:
            weights[:, -1] = 2
        for group in range(3):
            scores = weights[group] if per_query_head else weights.sum(0)
            own = found[row, group] if per_query_head else found[row]
            assert sorted(own.tolist()) == sorted(scores.topk(count).indices.tolist())


def test_keys_are_projected_once_as_they_come():
    torch.manual_seed(1)
    keys = torch.randn(1, 20, 4)
    whole, parts = LowRankKeys(2, 10), LowRankKeys(2, 10)
    whole.update(kv_rows_of(keys))
    for size in (12, 13, 20):
        parts.update(kv_rows_of(keys[:, :size]))
    torch.testing.assert_close(parts.bounds(), whole.bounds())
    parts.keep_first(15)
    parts.update(kv_rows_of(keys))
    torch.testing.assert_close(parts.bounds(), whole.bounds())
    parts.keep_first(5)
    assert parts.components is None


def test_settings_split_the_budget():
    facts = ReadFacts(0, 4, 4000, 96, 64)
    assert Loki(budget=512).setting(facts) == LokiSetting(512, 256, 1, 8, fitted=4000)
    assert Loki(budget=16).setting(facts) == LokiSetting(16, 8, 1, 1, fitted=4000)
    assert Loki(budget=1024, part=0.25).setting(facts) == LokiSetting(1024, 1024, 1, 16, fitted=4000)


@pytest.mark.parametrize("part", [0, 1.5, -0.25])
def test_bad_parts_are_refused(part):
    with pytest.raises(PlanError, match="part must be a share above 0"):
        Loki(budget=16, part=part)
