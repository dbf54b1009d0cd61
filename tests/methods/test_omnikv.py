"""OmniKV: tokens by the attention of any head, read by all heads of the layers after a filter."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from attend import asking
from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.errors import PlanError
from kvsieve.methods import OmniKV
from kvsieve.methods.omnikv import filter_at
from kvsieve.methods.readers import Setting


@pytest.mark.parametrize("newest", [False, True])
def test_all_heads_of_a_batch_row_read_the_tokens_that_any_attends_to(newest):
    torch.manual_seed(0)
    query, keys = torch.randn(4, 3, 5, dtype=torch.float64), torch.randn(4, 20, 5, dtype=torch.float64)
    kv_rows = KVRows(keys.flatten(0, 1), keys.flatten(0, 1), None, torch.arange(4) * 20, 1, 20, heads=2)
    reader = OmniKV(budget=16, newest=newest)
    found = reader.choose(asking(query, 0.5), kv_rows, {}, Setting(16, 6)).entries
    for row in range(2):
        of_row = slice(2 * row, 2 * row + 2)
        weights = (query[of_row] @ keys[of_row].transpose(1, 2) * 0.5).softmax(-1).amax((0, 1))
        if newest:
            weights[-1] = 2
        wanted = sorted(weights.topk(6).indices.tolist())
        assert [sorted(entries) for entries in found[of_row].tolist()] == [wanted, wanted]


def test_filters_and_the_layers_after_them():
    reader = OmniKV(budget=16)
    facts = [ReadFacts(layer, 32, 1000, 0, 8) for layer in range(32)]
    settings = [reader.setting(one) for one in facts]
    assert [layer for layer, setting in enumerate(settings) if setting is None] == [0, 1, 3, 9, 19]
    assert [layer for layer, setting in enumerate(settings) if setting is not None and setting.dense] == [2, 8, 18]
    assert [reader.anchor(layer, 32) for layer in (4, 7, 10, 31)] == [2, 2, 8, 18]
    assert OmniKV(budget=16, wait=0).setting(facts[3]) == Setting(16, 16)
    assert [filter_at(layer, 24) for layer in (2, 8, 18)] == [2, 6, 14] and filter_at(2, 4) == 1


def test_what_makes_no_sense_is_refused():
    with pytest.raises(PlanError, match="share=1 makes every layer a filter"):
        OmniKV(budget=16, share=1)
    with pytest.raises(PlanError, match="wait must be a whole number"):
        OmniKV(budget=16, wait=-1)
    assert kvsieve.plan("omnikv").read.share == (2, 8, 18)
