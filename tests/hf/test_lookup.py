"""Drafts copied from the conversation, and how many of them are fed."""

from __future__ import annotations

import random

import pytest
import torch

import kvsieve
from kvsieve.hf.drafts import opened
from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import COSTLY, DraftLength
from kvsieve.hf.drafts.lookup import LookupDrafter
from kvsieve.planning.specs import split_specs
from tiny import tiny_model, tiny_prompt


def drafted(tokens, most=4, ngram=2):
    drafter = LookupDrafter(ngram)
    drafter.extend(tokens)
    return drafter.propose(most)


def test_what_followed_the_longest_match_is_proposed():
    #        a long match          a newer, shorter one    the end
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 3, 4, 8, 8, 8, 7, 7, 1, 2, 3, 4]
    assert drafted(tokens) == [5, 6, 7, 9]


def test_the_newest_of_equal_matches_is_proposed():
    assert drafted([1, 2, 5, 0, 1, 2, 6, 0, 3, 1, 2]) == [6, 0, 3, 1]


def test_no_match_proposes_nothing():
    assert drafted([1, 2, 3, 4, 5]) == [] == drafted([1, 2]) == drafted([])


def test_a_match_that_reaches_the_end_repeats():
    assert drafted([5, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]
    assert drafted([7, 7, 7], most=3) == [7, 7, 7]


@pytest.mark.parametrize(
    ("changed", "follows", "number"),
    [
        ([50], [21, 22, 23], 0),
        ([50, 51, 21], [22, 23, 24], 4),
        ([22], [23, 24, 25], 4),
    ],
    ids=["a token replaced", "tokens added", "tokens left out"],
)
def test_a_copy_goes_on_behind_an_edit(changed, follows, number):
    original = list(range(10, 30))
    drafter = LookupDrafter(3)
    drafter.extend([*original, 99, *range(10, 20)])
    assert drafter.propose(2) == [20, 21]
    drafter.extend(changed)
    assert drafter.propose(3) == follows
    assert drafter.confidence == number


def test_a_value_that_differs_is_taken_from_the_text_it_comes_from():
    """Two texts are copied in turns, field names of one and values of the other."""
    row = [70, 71, 72, 73]
    names = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
    drafter = LookupDrafter(2)
    drafter.extend([*row, 99, *names, 50, 51, *names, 60, 61, 98, 70, 71])
    assert drafter.propose(1) == [72]
    drafter.extend([20, 21])
    assert drafter.propose(2) == [22, 23]
    # The value is not that of the names' text.
    drafter.extend([*names[2:], 72])
    assert drafter.propose(1) == [73]
    assert drafter.confidence == 1


def longest(tokens, ngram):
    """Length of the longest earlier match of the end, by comparing every place."""
    found = 0
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        found = max(found, length)
    return found if found >= ngram else 0


@pytest.mark.parametrize("ngram", [1, 3])
def test_a_match_is_the_longest_whatever_came_before(ngram):
    """Tokens come in pieces, as answers do, and a proposal is asked for after each."""
    draw = random.Random(ngram)
    tokens = [draw.randrange(6) for _ in range(30)]
    drafter = LookupDrafter(ngram)
    drafter.extend(tokens)
    for _ in range(60):
        found = drafter.propose(3)
        length = longest(tokens, ngram)
        assert (drafter.confidence > 1 and bool(found)) == bool(length)
        if length:
            continuations = {
                (*tokens, *tokens)[place]
                for place in range(1, len(tokens))
                if tokens[:place][-length:] == tokens[-length:]
            }
            assert found[0] in continuations
        piece = [draw.randrange(6) for _ in range(draw.randrange(1, 4))]
        tokens += piece
        drafter.extend(piece)


def rows(tokens, **length):
    drafter = LookupDrafter(2)
    return RowDrafts(drafter, DraftLength(4, 0.1, **length), tokens)


class Ones(Drafter):
    """Proposes ones, always."""

    def extend(self, tokens):
        pass

    def propose(self, most):
        return [1] * most


def test_drafts_that_are_wrong_stop_and_come_back():
    """While nothing is drafted, what would have been shows when drafting pays again."""
    drafts = RowDrafts(Ones(), DraftLength(8, 0.1), [])
    fed = []
    for answer in [2] * 60 + [1] * 60:
        found = drafts.next(8)
        fed.append(len(found))
        drafts.took([answer] * (len(found) + 1 if answer == 1 else 1))
    assert fed[0]
    assert not any(fed[20:60])
    assert all(fed[-20:])
    assert fed[-1] == 8


class Guesses(Drafter):
    """Proposes tokens of one class after another, each of which is right with some probability."""

    confidence = 0

    def __init__(self, classes, right):
        self._draw = random.Random(0)
        self._classes = classes
        self._right = right

    def extend(self, tokens):
        pass

    def propose(self, most):
        self.confidence = self._draw.randrange(self._classes)
        return [int(self._draw.random() < self._right) for _ in range(most)]


@pytest.mark.parametrize("right", [0.0, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize(("first", "slope"), [(0.06, 0.07), (0.2, 0.2), (0.5, 0.01)])
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_lose_little_whatever_they_are_worth(right, first, slope, rows):
    """Time in passes over one token: 0.6, and 0.015 for each pass. Those that are right are made up for at once."""
    length = DraftLength(8, slope, first=first)
    length.rows = rows
    drafts = RowDrafts(Guesses(5, right), length, [])
    part = rows / (1 + slope * (rows - 1))
    lost = 0.0
    for number in range(200):
        fed = drafts.next(8)
        count = fed.index(0) if 0 in fed else len(fed)
        drafts.took([1] * (count + 1))
        lost += (first + slope * len(fed)) * part * bool(fed) - count
        assert lost <= 0.6 + 0.015 * number + 1e-9
    assert right < 0.9 or lost < -50


def test_counts_add_up():
    drafts = rows([1, 2, 3, 1, 2], adapt=False)
    assert drafts.next(2) == [3, 1]
    drafts.took([3, 9])
    assert drafts.next(2) == []
    drafts.took([4])
    counts = drafts.counts
    assert (counts.passes, counts.drafted_passes, counts.drafted, counts.accepted) == (2, 1, 2, 1)
    assert str(counts) == "1 of 2 drafted tokens accepted, 1 of 2 passes drafted, 1.5 tokens a pass"


@pytest.mark.parametrize(("slope", "least"), [(0.05, 4), (1.0, 0)])
def test_a_pass_that_costs_as_much_per_token_is_never_drafted_for(slope, least):
    assert DraftLength(4, slope).of_class(5, 4) == least


@pytest.mark.parametrize(
    ("plan", "dtype", "native", "cost"),
    [
        ("full", torch.bfloat16, True, (0.06, 0.56 * 0.07)),
        ("snapkv:budget=10:window=4:every=2", torch.bfloat16, True, (0.06, 0.56 * 0.2)),
        ("quest:budget=16", torch.bfloat16, True, (0.06, 0.07)),
        ("full", torch.bfloat16, False, (0.0, 0.16)),
        ("snapkv:budget=10:window=4", torch.float32, True, (0.0, 0.16)),
        ("snapkv:budget=10:window=4:every=2", torch.float32, True, (0.3, 0.22)),
        ("kivi:bits=4", torch.float32, True, (0.3, 0.22)),
    ],
)
def test_passes_are_estimated_by_products_and_by_what_layers_do(monkeypatch, plan, dtype, native, cost):
    """In float32 further tokens take longer; layers that do more than store them are not computed in one call."""
    monkeypatch.setattr(opened, "cpu_computes_bfloat16", lambda: native)
    ((name, parameters),) = split_specs(plan)
    with kvsieve.attach(tiny_model(dtype=dtype), kvsieve.plan(name, **parameters)) as sieve:
        assert opened.pass_cost(sieve, sieve.new_cache()) == pytest.approx(cost)


def test_further_tokens_take_longer_beside_more_entries(monkeypatch):
    """Each is multiplied with all entries, which one pass reads once; evicted ones take no time."""
    monkeypatch.setattr(opened, "cpu_computes_bfloat16", lambda: True)
    model = tiny_model(dtype=torch.bfloat16)
    slopes = []
    for size, plan in ((20, "full"), (500, "full"), (500, "snapkv")):
        options = {} if plan == "full" else {"budget": 40, "window": 4}
        with kvsieve.attach(model, kvsieve.plan(plan, **options)) as sieve:
            slopes.append(opened.pass_cost(sieve, sieve.prefill(tiny_prompt(size=size)))[1])
    assert slopes[0] < slopes[2] < 0.5 * slopes[1]
    # Where attention is all, twice the entries take twice the time, in passes that take twice the time.
    assert slopes[1] < 5 * 0.07


def test_costly_drafts_pause_longer_and_longer():
    length = DraftLength(4, 0.1, draft=0.2)
    counts = []
    for _ in range(300):
        count = length.of_costly()
        counts.append(count)
        if count:
            length.note(COSTLY, count, 0)
    assert counts[0] and sum(map(bool, counts)) < 40 and sum(map(bool, counts[-100:])) <= 3


def test_costly_drafts_that_cannot_pay_are_not_tried():
    assert DraftLength(4, 0.1, draft=0.6).of_costly() == 1
    assert DraftLength(4, 0.1, draft=0.9).of_costly() == 0


def test_a_drafter_that_fails_is_dropped():
    class Failing(LookupDrafter):
        def propose(self, most):
            raise ValueError("out of words")

    drafts = RowDrafts(Failing(), DraftLength(4, 0.1), [1, 2, 3])
    assert drafts.next(3) == []
    drafts.took([4])
    assert drafts.next(3) == []
    assert "out of words" in drafts.note and "went on without" in drafts.note
