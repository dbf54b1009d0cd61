"""Fits of Attention Matching: weights and values against naive solutions on small tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvsieve.core.matching import MatchedPart, attended, bounded_least_squares, fitted_values, fitted_weights
from kvsieve.types import AttentionQueries

SCALE = 0.5


def part_of(queries=40, entries=12, *, batch=2, heads=2, groups=3, seed=0, step=7, **more):
    make = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    asked = AttentionQueries(random(batch, heads * groups, queries, 4), SCALE)
    return MatchedPart(asked, random(batch, heads, entries, 4), random(batch, heads, entries, 5), step=step, **more)


def logits(part, row, head):
    """[G * T, N] logits of one KV head's references, filler left out."""
    groups = part.asked.query.shape[1] // part.keys.shape[1]
    query = part.asked.query[row, head * groups : (head + 1) * groups]
    query = query if part.real is None else query[:, part.real[row]]
    found = query.flatten(0, 1) @ part.keys[row, head].T * SCALE
    return found if part.log_weight is None else found + part.log_weight[row, head]


def everywhere(part):
    return [(row, head) for row in range(part.keys.shape[0]) for head in range(part.keys.shape[1])]


def chosen(part, count):
    slots = attended(part).scores.topk(count).indices.sort().values
    return slots, part.at(slots, None)


@pytest.mark.parametrize("step", [3, 1000])
def test_scores_are_root_mean_squares_of_attention(step):
    part = part_of(step=step, real=torch.arange(40) >= torch.tensor([[0], [13]]))
    scores = attended(part).scores
    for row, head in everywhere(part):
        wanted = logits(part, row, head).softmax(-1).square().mean(0).sqrt()
        assert torch.allclose(scores[row, head], wanted)


def test_sinks_take_their_share_of_the_scores():
    part = part_of()
    sinks = torch.linspace(-1, 2, 6, dtype=torch.float64)
    asked = replace(part.asked, sinks=sinks)
    scores = attended(replace(part, asked=asked)).scores
    for row, head in everywhere(part):
        sink = sinks[head * 3 : head * 3 + 3].repeat_interleave(40)[:, None]
        weights = torch.cat([logits(part, row, head), sink], 1).softmax(-1)[:, :-1]
        assert torch.allclose(scores[row, head], weights.square().mean(0).sqrt())


def test_weights_are_the_best_within_their_bounds():
    """The gradient is zero inside the bounds, and points outwards at them."""
    part = part_of(entries=30)
    slots, few = chosen(part, 8)
    weights = fitted_weights(few, attended(part)).double().exp()
    inside = 0
    for row, head in everywhere(part):
        whole = logits(part, row, head)
        whole = (whole - whole.amax(1, keepdim=True)).exp()
        columns = whole[:, slots[row, head]]
        found = weights[row, head]
        gradient = columns.T @ (columns @ found - whole.sum(1))
        size = columns.T @ whole.sum(1)
        low, high = found < 0.0499, found > 20.08
        free = ~low & ~high
        inside += int(free.sum())
        assert (gradient[free].abs() < 1e-4 * size[free]).all()
        assert (gradient[low] > 0).all() and (gradient[high] < 0).all()
    assert inside > 10


def test_values_are_ridge_least_squares_of_the_output():
    part = part_of(entries=30)
    slots, few = chosen(part, 8)
    few = replace(few, log_weight=torch.randn(slots.shape, generator=torch.Generator().manual_seed(1)))
    found = fitted_values(few, attended(part), 0.01)
    for row, head in everywhere(part):
        output = logits(part, row, head).softmax(-1) @ part.values[row, head]
        mixed = logits(few, row, head).softmax(-1)
        own = few.values[row, head]
        ridge = (0.01 * (mixed.T @ mixed).diagonal().mean()).sqrt() * torch.eye(8, dtype=torch.float64)
        wanted = torch.linalg.lstsq(torch.cat([mixed, ridge]), torch.cat([output, ridge @ own])).solution
        assert torch.allclose(found[row, head], wanted)


def test_one_entry_stands_for_three_equal_ones():
    part = part_of(entries=4)
    several = replace(part, keys=part.keys[:, :, [0, 1, 2, 3, 3, 3]], values=part.values[:, :, [0, 1, 2, 3, 3, 3]])
    whole = attended(several)
    few = several.at(torch.arange(4).expand(2, 2, 4), None)
    weights = fitted_weights(few, whole)
    assert torch.allclose(weights.exp(), torch.tensor([1.0, 1, 1, 3]), atol=1e-4)
    assert torch.allclose(fitted_values(replace(few, log_weight=weights), whole, 1e-9), part.values, atol=1e-4)
    weighted = replace(part, log_weight=torch.tensor([1.0, 1, 1, 3]).log().expand(2, 2, 4))
    assert torch.allclose(attended(weighted).blocks[0][1], whole.blocks[0][1], atol=1e-6)
    assert torch.allclose(fitted_weights(weighted, attended(weighted)), weighted.log_weight, atol=1e-4)


def test_mixtures_of_few_values_are_recovered():
    """Entries with no attention are replaced without loss, and all entries are their own best."""
    part = part_of(entries=9)
    hidden = replace(part, log_weight=torch.where(torch.arange(9) < 5, 0.0, -60.0).expand(2, 2, 9))
    few = hidden.at(torch.arange(5).expand(2, 2, 5), None)
    assert fitted_weights(few, attended(hidden)).abs().max() < 1e-4
    assert torch.allclose(fitted_values(few, attended(hidden), 1e-4), few.values)
    assert torch.allclose(fitted_values(part, attended(part), 0.0), part.values)


def test_fixed_entries_and_filler_stay_as_they_are():
    part = part_of(entries=30)
    slots, few = chosen(part, 8)
    fixed = torch.zeros(2, 2, 8, dtype=torch.bool)
    fixed[..., 2] = True
    whole = attended(part)
    weights = fitted_weights(few, whole, fixed)
    values = fitted_values(replace(few, log_weight=weights), whole, 1e-4, fixed)
    assert (weights[..., 2] == 0).all() and (values[..., 2, :] == few.values[..., 2, :]).all()
    assert (weights[~fixed] != 0).all() and (values[~fixed] != few.values[~fixed]).all()
    # Row 1 keeps 5, after 3 of filler.
    real = torch.arange(8) >= torch.tensor([[0], [3]])
    padded = part.at(slots, real)
    alone = part.at(slots[:, :, 3:], None)
    weights, wanted = fitted_weights(padded, whole), fitted_weights(alone, whole)
    assert torch.allclose(weights[1, :, 3:], wanted[1], atol=1e-6) and (weights[1, :, :3] == 0).all()
    values = fitted_values(replace(padded, log_weight=weights), whole, 1e-4)
    wanted = fitted_values(replace(alone, log_weight=wanted), whole, 1e-4)
    assert torch.allclose(values[1, :, 3:], wanted[1], atol=1e-6) and values.isfinite().all()


def test_values_without_a_ridge_survive_equal_keys():
    part = part_of(entries=6)
    part = replace(part, keys=part.keys[:, :, [0, 1, 2, 3, 3, 3]])
    few = part.at(torch.arange(1, 6).expand(2, 2, 5), None)
    assert fitted_values(few, attended(part), 0.0).isfinite().all()


def test_weights_stay_within_their_bounds():
    columns = torch.rand(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    low, high = torch.full((5,), 0.05, dtype=torch.float64), torch.full((5,), 20.0, dtype=torch.float64)
    found = bounded_least_squares(columns.T @ columns, columns.sum(0), low, high)
    assert torch.allclose(found, high)
    square = torch.eye(5, dtype=torch.float64)
    found = bounded_least_squares(square, square[0] * 7 - 1, low, high)
    assert torch.allclose(found, torch.tensor([6, *[0.05] * 4], dtype=torch.float64))
