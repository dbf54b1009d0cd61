"""Sharing out a budget: bounds, exact totals, and what the published examples say."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvsieve.core.allocation import allocate, clusters, pyramid, tokens_reaching, water_fill, winners


def test_shares_follow_the_weights_and_round_by_the_largest_remainder():
    assert water_fill([1, 3], 8, [0, 0], [9, 9]) == [2, 6]
    # 2.5, 3.33, 4.17: one entry is missing below the decimals, and .5 is the largest remainder.
    assert allocate([3, 4, 5], 10, [0] * 3, [10] * 3) == [3, 3, 4]
    assert allocate([1, 1, 1], 10, [0] * 3, [10] * 3) == [4, 3, 3]


def test_what_bounds_take_or_leave_is_shared_by_the_others():
    # 8 of 10 would go to the first; it holds 5, and the other 5 go 1 : 1 : 3.
    assert allocate([40, 2, 2, 6], 10, [0] * 4, [5, 9, 9, 9]) == [5, 1, 1, 3]
    # The floor of 4 leaves 6 for 3 : 1.
    assert water_fill([0, 3, 1], 10, [4, 0, 0], [9, 9, 9]) == [4, 4.5, 1.5]
    # A cap frees what then lifts another one above its floor, and the other way round.
    assert water_fill([6, 3, 1], 20, [0, 0, 1], [10, 4, 9]) == [10, 4, 6]
    assert allocate([1, 1], 7, [0, 0], [2, 3]) == [2, 3], "all there is"
    assert allocate([1, 1], 3, [2, 3], [9, 9]) == [2, 3], "what must be"
    assert allocate([0, 0, 0], 7, [0] * 3, [9] * 3) == [3, 2, 2]
    assert allocate([5, 0, 0], 7, [0] * 3, [3, 9, 9]) == [3, 2, 2]
    assert allocate([], 0, [], []) == []


@pytest.mark.parametrize("bad", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]], ids=str)
def test_weights_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        water_fill(bad, 4, [0, 0], [9, 9])


def random_case(rng):
    size = rng.randint(1, 9)
    weights = [rng.choice([0, 1e-9, 1.0, rng.random(), 1e6 * rng.random()]) for _ in range(size)]
    floors = [rng.randint(0, 6) for _ in range(size)]
    caps = [floor + rng.randint(0, 30) for floor in floors]
    return weights, rng.randint(0, 200), floors, caps


def test_totals_are_exact_and_bounds_hold():
    rng = random.Random(1)
    for _ in range(2000):
        weights, total, floors, caps = random_case(rng)
        out = allocate(weights, total, floors, caps)
        assert sum(out) == min(max(total, sum(floors)), sum(caps))
        assert all(low <= each <= high for low, each, high in zip(floors, out, caps, strict=True))
        exact = water_fill(weights, total, floors, caps)
        assert all(abs(each - share) < 1 + 1e-6 for each, share in zip(out, exact, strict=True))
        # One level for all that are between their bounds.
        free = [i for i in range(len(out)) if floors[i] + 1e-6 < exact[i] < caps[i] - 1e-6 and weights[i]]
        levels = [exact[i] / weights[i] for i in free]
        assert not levels or max(levels) <= min(levels) * (1 + 1e-6)


def test_shares_only_shrink_as_parties_join():
    rng = random.Random(2)
    for _ in range(500):
        weights, total, floors, caps = random_case(rng)
        total = max(total, sum(floors))
        before = [float("inf")] * len(weights)
        for count in range(1, len(weights) + 1):
            now = water_fill(weights[:count], total, floors[:count], caps[:count])
            assert all(new <= old + 1e-6 for new, old in zip(now, before, strict=False))
            before[:count] = now


def test_pyramid_golden():
    assert pyramid(1000, 8, 256, 8, floored=True) == pyramid(600, 8, 256, 8, floored=True)
    assert pyramid(1000, 8, 256, 8, floored=True) == [500, 431, 362, 293, 224, 155, 86, 17]
    assert pyramid(300, 8, 256, 8, floored=True) == pyramid(300, 8, 256, 8) == [256] * 8
    line = pyramid(1000, 8, 256, 8)
    assert (line[0], line[-1]) == (500, 12) and sum(line) == pytest.approx(8 * 256)


def test_pyramid_falls_and_keeps_its_mean():
    for length, window, budget, layers, beta in itertools.product(
        (5, 33, 90, 1001), (1, 8), (1, 7, 40), (1, 2, 5), (1, 20)
    ):
        line = pyramid(length, window, budget, layers, beta)
        assert sum(line) == pytest.approx(budget * layers)
        assert all(a >= b >= 0 for a, b in itertools.pairwise(line))
        assert length < budget + window or line[0] <= length - window
        assert beta > 1 or line == [budget] * layers
        whole = allocate(line, budget * layers, [0] * layers, [max(length, budget)] * layers)
        assert sum(whole) == budget * layers and whole == sorted(whole, reverse=True)
        surplus = sum(pyramid(length, window, budget, layers, beta, floored=True)) - budget * layers
        assert 0 <= surplus <= layers * (layers - 1) / 2


def test_winners_by_hand():
    scores = torch.tensor([[[0.5, 0.3, 0.1, 0.05, 0.03, 0.02], [0.2, 0.2, 0.2, 0.15, 0.15, 0.1]]])
    # .5 .3 .2 .2 .2 .15
    assert winners(scores, (6,)).tolist() == [[2, 4]]
    assert winners(scores, (3,)).tolist() == [[2, 1]]
    assert winners(scores.masked_fill(scores < 0.15, float("-inf")), (12,)).tolist() == [[2, 5]]


def brute(values, count):
    points = sorted(set(values))
    found, best = min(count, len(points)), None
    for cuts in itertools.combinations(range(1, len(points)), found - 1):
        parts = [points[a:b] for a, b in itertools.pairwise([0, *cuts, len(points)])]
        groups = [[value for value in values if value in part] for part in parts]
        cost = sum(sum((value - sum(group) / len(group)) ** 2 for value in group) for group in groups)
        if best is None or cost < best[0] - 1e-12:
            best = cost, groups
    return best


def test_clusters_are_the_optimum():
    assert clusters([0.9, 0.1, 0.91, 0.5, 0.12], 3) == [2, 0, 2, 1, 0]
    assert clusters([0.3, 0.3, 0.3], 3) == [0, 0, 0] and clusters([0.5, 0.2], 3) == [1, 0]
    rng = random.Random(3)
    for _ in range(60):
        values = [round(rng.random(), rng.choice([1, 6])) for _ in range(rng.randint(1, 9))]
        labels = clusters(values, 3)
        cost, groups = brute(values, 3)
        means = [
            sum(group) / len(group)
            for group in (
                [v for v, label in zip(values, labels, strict=True) if label == k] for k in sorted(set(labels))
            )
        ]
        assert means == sorted(means) and len(means) == len(groups)
        ours = sum((value - means[label]) ** 2 for value, label in zip(values, labels, strict=True))
        assert ours == pytest.approx(cost, abs=1e-12)


def test_tokens_reaching_counts_the_fewest():
    mass = torch.tensor([[[0.5, 0.1, 0.25, 0.15], [4.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    # Head 0 needs .5 + .25 + .15, head 1 its one.
    assert tokens_reaching(mass, 0.9).tolist() == [2.0]
    assert tokens_reaching(mass, 0.7).tolist() == [1.5]
    assert tokens_reaching(mass, 1.0).tolist() == [2.5]
