"""CaM: values of entries dropped while decoding go to the entries after them, by a drawn number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import CaM
from kvsieve.types import Step
from merging import chosen, entries, listed

KEYS = [[float(number), 1.0] for number in range(6)]
VALUES = [[1.0], [10.0], [100.0], [1000.0], [1e4], [1e5]]


def decoding(mass, **more):
    """A context of a generated token, after the entries received this attention."""
    ctx = entries(KEYS, VALUES)
    state = {"generated_mass": torch.tensor(mass, dtype=torch.float64)[None, None], "generated_mass_index": ctx.index}
    return replace(
        ctx, step=Step(5, 1, "decode", True, 0, 0, (6,), (6,)), query=ctx.query[:, :, -1:], state=state, **more
    )


def values(rule, ctx):
    found = chosen(rule, ctx)
    assert found.keys is None and found.log_weight is None
    return found.values[0, 0, :, 0].tolist()


def test_values_go_to_the_entries_after():
    # Slots 1 and 2 go. Attended more than those after them, they surely merge, in halves: 1 to 3 and 4, 2 to 3 and 4.
    rule = CaM(base=listed(0, 3, 4, 5), sinks=0, span=2)
    assert values(rule, decoding([0, 5, 5, 1, 1, 1])) == [1.0, 1055.0, 10055.0, 1e5]
    # Near the end fewer entries share.
    rule = CaM(base=listed(0, 1, 2, 4), sinks=0, span=3)
    assert values(rule, decoding([0, 1, 1, 9, 1, 9])) == [1.0, 10.0, 100.0, 11000.0]
    # Entries without attention never merge, nor do those among which nothing follows.
    assert values(rule, decoding([0] * 6)) == [1.0, 10.0, 100.0, 1e4]


def test_protected_entries_get_nothing():
    fixed = torch.zeros(1, 1, 6, dtype=torch.bool)
    fixed[..., 3] = True
    rule = CaM(base=listed(0, 3, 4, 5), sinks=0, span=2)
    found = values(rule, decoding([0, 5, 5, 1, 1, 1], protected=fixed))
    assert found == [1.0, 1000.0, 10055.0, 100055.0]


def test_prompts_only_drop():
    rule = CaM(base=listed(0, 3, 4, 5), sinks=0)
    assert not chosen(rule, entries(KEYS, VALUES)).writes


def test_draws_are_uniform_and_of_their_entries_alone():
    keys = torch.zeros(1, 4, 5000, 1)
    ctx = entries(KEYS)
    ctx = replace(ctx, keys=keys, index=torch.arange(5000, dtype=torch.int32).expand(1, 4, -1), layer_idx=2)
    rule = CaM(base=listed(0))
    drawn = rule._draws(ctx)
    assert drawn.min() >= 0 and drawn.max() < 1
    assert torch.histc(drawn.float(), 10, 0, 1).div(2000).sub(1).abs().max() < 0.1
    assert torch.corrcoef(drawn[0]).fill_diagonal_(0).abs().max() < 0.05
    assert abs(float(torch.corrcoef(torch.stack([drawn[0, 0, 1:], drawn[0, 0, :-1]]))[0, 1])) < 0.05
    part = replace(ctx, keys=keys[..., 100:200, :], index=ctx.index[..., 100:200])
    assert torch.equal(rule._draws(part), drawn[..., 100:200])
    for other in (CaM(base=listed(0), seed=1)._draws(ctx), rule._draws(replace(ctx, layer_idx=3))):
        assert abs(float(torch.corrcoef(torch.stack([other[0, 0], drawn[0, 0]]))[0, 1])) < 0.05


def test_the_share_of_merges_is_the_ratio_of_attention():
    size = 2000
    keys, kept = torch.zeros(size, 1), range(1, size, 2)
    ctx = entries(keys, torch.ones(size, 1))
    mass = torch.ones(1, 1, size, dtype=torch.float64)
    mass[..., ::2] = 0.3
    state = {"generated_mass": mass, "generated_mass_index": ctx.index}
    ctx = replace(ctx, step=Step(size - 1, 1, "decode", True, 0, 0, (size,), (size,)), state=state)
    found = chosen(CaM(base=listed(*kept), sinks=0, span=1), ctx)
    assert float(found.values.mean()) - 1 == pytest.approx(0.3, abs=0.05)


def test_refusals_and_defaults():
    plan = kvsieve.plan("cam", budget=20)
    assert plan.evict.when == kvsieve.types.When(steps=1, observes=True)
    assert plan.evict.span == 32
    for wrong in ({"span": 0}, {"seed": -1}, {"base": "cam"}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            kvsieve.plan("cam", **wrong)
