"""Q-Filters: keys along a direction, by hand, by a slow reference, and on a model."""

from __future__ import annotations

import json

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.errors import PlanError
from kvsieve.methods import QFilters
from kvsieve.planning.profiles import Fingerprint, Profile
from layers import context, kept
from tiny import tiny_prompt
from tiny_models import build


def test_by_hand():
    # Projections on (0.6, 0.8): 1.0, -5.0, 0.8, 0.6, 1.0; equal ones go to the lower slot.
    keys = torch.tensor([[0.6, 0.8], [-3.0, -4.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])[None, None]
    ctx = context(torch.zeros_like(keys), keys, num_layers=2)
    filters = (((0.6, 0.8),), ((1.0, 0.0),))
    assert kept(QFilters(budget=1, filters=filters), ctx) == [[0]]
    assert kept(QFilters(budget=3, filters=filters), ctx) == [[0, 2, 4]]
    assert kept(QFilters(budget=2, filters=filters, recent=1), ctx) == [[0, 4]]
    assert kept(QFilters(budget=3, filters=filters, recent=2), ctx) == [[0, 3, 4]]
    deep = context(torch.zeros_like(keys), keys, num_layers=2, layer_idx=1)
    assert kept(QFilters(budget=1, filters=filters), deep) == [[3]]
    assert QFilters(budget=1, filters=filters, skip_layers=1).select(ctx, (1,)) is None


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def test_equals_the_slow_reference_in_padded_batches(groups):
    torch.manual_seed(groups)
    heads, length, dim, padding, recent = 2, 61, 8, [0, 19], 4
    keys = torch.randn(2, heads, length, dim, dtype=torch.float64)
    ctx = context(torch.randn(2, heads * groups, length, dim), keys, padding=padding, layer_idx=1, num_layers=2)
    filters = torch.randn(2, heads, dim, dtype=torch.float64)
    evictor = QFilters(budget="30%", filters=filters.tolist(), recent=recent)
    for row, pad in enumerate(padding):
        count = int((length - pad) * 0.3)
        for head, ours in enumerate(kept(evictor, ctx, row)):
            scores = {j: sum(float(keys[row, head, j, d] * filters[1, head, d]) for d in range(dim))
                      for j in range(pad, length - recent)}  # fmt: skip
            best = sorted(scores, key=lambda j: (-scores[j], j))[: count - recent]
            assert ours == [*sorted(best), *range(length - recent, length)]


def test_it_needs_a_profile_with_filters():
    no_profile = "qfilters needs a profile with q_filters, and none of .*kvsieve calibrate MODEL --parts q_filters"
    with (
        pytest.raises(PlanError, match=no_profile),
        kvsieve.attach(build("llama"), kvsieve.plan("qfilters", budget=10)),
    ):
        pass
    with pytest.raises(PlanError, match="the profile of m holds no q_filters"):
        kvsieve.plan("qfilters", profile=Profile(Fingerprint("llama", 1, 1, 1, 1, 1, 1, "m")))
    info = kvsieve.method_info("qfilters")
    own = {"budget", "profile", "recent", "every", "skip_layers", "floor", "answer", "grows"}
    assert info.roles == ("evict",) and own == set(info.parameters)


def test_filters_that_do_not_fit_are_refused():
    keys = torch.zeros(1, 2, 9, 4)
    for filters in ([[[1.0] * 4] * 2], [[[1.0] * 4]] * 4, [[[1.0] * 3] * 2] * 4):
        with pytest.raises(PlanError, match="do not fit layer 0 of 4 with 2 KV heads of 4"):
            kept(QFilters(budget=3, filters=filters), context(keys, keys))
    for bad in (3, [[1.0]], [[["x"]]]):
        with pytest.raises(PlanError, match="filters must be numbers"):
            QFilters(budget=3, filters=bad)
    with pytest.raises(PlanError, match="recent"):
        QFilters(budget=3, filters=(), recent=-1)
    with pytest.raises(PlanError, match="3 entries is too small, at least 4"):
        QFilters(budget=3, filters=(), recent=3)


def test_on_a_model_and_as_json():
    model = build("llama")
    filters = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)).tolist()
    profile = Profile.from_dict({**Profile(Fingerprint.of(model)).to_dict(), "q_filters": filters})
    plan = kvsieve.plan("qfilters", profile=profile, budget=12, recent=3, skip_layers=1)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and hash(again) == hash(plan) and again.profile == profile.fingerprint
    ids = tiny_prompt(1, 50, seed=1)
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids, max_new_tokens=2, do_sample=False)
    assert result.stats.kv_entries == [50, 12, 12, 12] and result.stats.applied
    with kvsieve.attach(model, plan) as sieve:
        parts = sieve.generate(ids, chunk=7, max_new_tokens=2, do_sample=False)
    for one, other in zip(result.cache.sieve_layers.values(), parts.cache.sieve_layers.values(), strict=True):
        assert torch.equal(one.store.index, other.store.index)
