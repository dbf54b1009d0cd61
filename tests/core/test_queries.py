"""`query_mass` against plain loops."""

from __future__ import annotations

import pytest
import torch

from attend import query_mass
from spying import softmax_rows


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def test_query_mass_equals_plain_loops(groups, monkeypatch):
    torch.manual_seed(groups)
    query = torch.randn(2, 2 * groups, 5, 8, dtype=torch.float64)
    keys = torch.randn(2, 2, 13, 8, dtype=torch.float64)
    visible = torch.rand(2, 2, 5, 13) < 0.6
    visible[1, :, 2] = False
    weights = torch.rand(2, 1, 5, dtype=torch.float64)
    total = query_mass(query, keys, 0.3, visible, weights=weights)
    most = query_mass(query, keys, 0.3, visible, reduce="max")
    for row in range(2):
        for head in range(2 * groups):
            shown = visible[row, head // groups]
            rows = softmax_rows(query[row, head], keys[row, head // groups], 0.3, lambda t, j, shown=shown: shown[t, j])
            rows = torch.tensor(rows, dtype=torch.float64)
            assert torch.allclose(most[row, head], rows.amax(0), atol=1e-12)
            assert torch.allclose(total[row, head], (rows * weights[row, 0, :, None]).sum(0), atol=1e-12)
    for queries in (1, 2):
        monkeypatch.setattr("kvsieve.core.queries._BLOCK_ELEMENTS", queries * 2 * 2 * groups * 13)
        assert torch.allclose(query_mass(query, keys, 0.3, visible, weights=weights), total, atol=1e-12)
        assert torch.allclose(query_mass(query, keys, 0.3, visible, reduce="max"), most, atol=1e-12)
    assert torch.allclose(query_mass(query, keys, 0.3, visible, reduce="max", entries=4), most[..., :4], atol=1e-12)


def test_scores_are_float32_for_half_precision_inputs():
    query, keys = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 1, 6, 4).bfloat16()
    mass = query_mass(query, keys, 0.5, torch.ones(1, 1, 3, 6, dtype=torch.bool))
    assert mass.dtype == torch.float32 and torch.allclose(mass.sum(-1), torch.full((1, 2), 3.0))
