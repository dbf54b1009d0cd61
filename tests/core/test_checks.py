"""Values that a device has are looked at when the host may wait, in order, once per dtype."""

from __future__ import annotations

import random

import pytest
import torch

from faraway import Away, watched
from kvsieve.core import checks
from kvsieve.core.blocks import BlockGrid


def test_what_is_away_is_told_when_it_is_looked_at():
    told, values = [], []
    with watched() as waits, checks.gathered(values):
        for number, value in enumerate((torch.tensor([3, 4]), torch.tensor(0.5), torch.tensor([True]))):
            checks.tell(Away(value), lambda found, number=number: told.append((number, found.tolist())))
        checks.tell(torch.tensor(7), lambda found: told.append(found.item()))
        assert told == [7] and not waits
        checks.look(values)
        checks.look(values)
    assert told == [7, (0, [3, 4]), (1, 0.5), (2, [True])] and sum(waits.values()) == 3


def test_the_first_thing_wrong_is_raised():
    values = []
    with watched(), checks.gathered(values):
        for wrong, what in (([False, False], "none"), ([False, True], "first"), ([True], "second")):
            checks.refuse(Away(torch.tensor(wrong)), lambda what=what: ValueError(what))
        with pytest.raises(ValueError, match="first"):
            checks.look(values)
        assert not values
    with pytest.raises(ValueError, match="here"):
        checks.refuse(torch.tensor([True]), lambda: ValueError("here"))


def test_pairs_of_blocks_are_counted_without_a_device():
    make = random.Random(5)
    for _ in range(200):
        block, new = make.choice([1, 2, 4, 8]), make.randint(1, 90)
        grid = BlockGrid(new, new + make.randint(0, 90), block * make.randint(1, 4), block)
        assert grid.pairs == int(grid.visible(torch.device("cpu")).sum())
