"""LaCache: which positions a layer keeps, by hand and as in the public code, and that any size works."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import LaCache
from kvsieve.methods.lacache import compact
from layers import context, kept
from small import stored
from tiny import greedy, padded_prompt, tiny_prompt


def prompt(length, layer_idx=0, num_layers=4, padding=None, **more):
    keys = torch.zeros(len(padding or [0]), 2, length, 1)
    ctx = context(keys, keys, padding=padding, layer_idx=layer_idx, num_layers=num_layers)
    return dataclasses.replace(ctx, **more)


def layers_of(evictor, length, num_layers=4, **more):
    """What every layer keeps of a prompt; its heads keep the same."""
    found = [kept(evictor, prompt(length, layer, num_layers, **more)) for layer in range(num_layers)]
    assert all(heads[0] == heads[1] for heads in found)
    return [heads[0] for heads in found]


def test_one_pass_by_hand():
    # Three entries more than the budget of 11: three ladders of two after the sink, and the layers alternate.
    even = [0, 1, 3, 5, *range(7, 14)]
    odd = [0, 2, 4, 6, *range(7, 14)]
    assert layers_of(LaCache(budget=11, sinks=1), 14) == [even, odd, even, odd]


def test_the_cursor_continues_and_starts_over_by_hand():
    # Of 10 entries beside the sinks the newest 4 are in no ladder: a pass has 6 ladders.
    part, cursor = compact(torch.arange(14), 10, 0, 4, (2, 1), 0)
    assert part.tolist() == [0, 2, 4, 6, 8, 9, 10, 11, 12, 13] and cursor == 4
    part, cursor = compact(torch.cat([part, torch.tensor([14])]), 10, cursor, 4, (2, 1), 0)
    assert part.tolist() == [0, 2, 4, 6, 8, 10, 11, 12, 13, 14] and cursor == 5
    # The sixth ladder, and two more among the oldest entries.
    part, cursor = compact(torch.cat([part, torch.arange(15, 18)]), 10, cursor, 4, (2, 1), 0)
    assert part.tolist() == [0, 4, 8, 10, 12, 13, 14, 15, 16, 17] and cursor == 2


# Kept entries of layers 0, 1 and 5 of six, from the arithmetic of the class LaCache of github.com/GATECH-EIC/LaCache
# (niah, commit 3c40b21) on lists of positions, with a `cache_size` one lower, which it raises by half of a ladder's
# drops. The drops of these prompts are whole ladders.
PUBLIC = [
    (
        LaCache(budget=15, sinks=1, span=2, overlap=1),
        30,
        {
            0: [0, 1, 2, 12, 16, 17, *range(21, 30)],
            1: [0, 3, 7, 13, 17, 18, *range(21, 30)],
            5: [0, 3, 7, 13, 17, 18, *range(21, 30)],
        },
    ),
    (
        LaCache(budget=14, sinks=1, span=2),
        64,
        {
            0: [0, 1, 22, 29, 36, 43, 50, *range(57, 64)],
            1: [0, 5, 23, 30, 37, 44, 51, *range(57, 64)],
            5: [0, 18, 27, 34, 41, 48, 55, *range(57, 64)],
        },
    ),
    (
        LaCache(budget=16, sinks=1, span=2, overlap=1),
        49,
        {
            0: [0, 1, 6, 22, 24, 31, 33, *range(40, 49)],
            1: [0, 3, 8, 23, 25, 32, 34, *range(40, 49)],
            5: [0, 13, 18, 27, 29, 36, 38, *range(40, 49)],
        },
    ),
]


@pytest.mark.parametrize(("evictor", "length", "wanted"), PUBLIC)
def test_prompts_keep_what_the_public_code_keeps(evictor, length, wanted):
    found = layers_of(evictor, length, 6)
    assert {layer: found[layer] for layer in wanted} == wanted


@pytest.mark.parametrize("every", [1, 4])
def test_answers_keep_what_the_public_code_keeps(model, every):
    """Of 60 tokens, 40 of them generated: the same class with a cache of 16 entries and 2 sinks on 4 layers."""
    plan = kvsieve.plan("lacache", budget=16, sinks=2, every=every)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.generate(tiny_prompt(size=20), max_new_tokens=41, **greedy()).cache
    even = [0, 1, 2, 28, 38, 44, 48, 50, *range(52, 60)]
    odd = [0, 1, 27, 37, 43, 47, 49, 51, *range(52, 60)]
    assert stored(cache)[0] == [[even] * 2, [odd] * 2] * 2


@pytest.mark.parametrize(
    ("layers", "given", "wanted"),
    [
        (32, {"span": 16}, (2, 1)),
        (32, {"span": 8, "overlap": 4}, (7, 2)),
        (24, {"span": 9, "overlap": 7}, (9, 5)),
        (28, {}, (2, 1)),
        (7, {}, (2, 1)),
        (2, {}, (2, 1)),
        # Ladders that would drop nothing.
        (1, {}, (2, 1)),
        (13, {"span": 9, "overlap": 7}, (4, 3)),
        (4, {"span": 6}, (2, 1)),
    ],
)
def test_ladders(layers, given, wanted):
    assert LaCache(budget=99, **given).ladder(layers) == wanted


@pytest.mark.parametrize("ladder", [(2, 1), (7, 2), (9, 5)])
def test_any_size_keeps_its_room_and_recent_entries(ladder):
    for layers in (1, 3, 8):
        for room in (0, 1, layers, layers + ladder[1], 30):
            for size in (room + 1, room + 5, 7 * room + 3):
                for cursor in (0, 4):
                    found = [
                        compact(torch.arange(size), room, cursor, layers, ladder, place) for place in range(layers)
                    ]
                    for left, end in found:
                        assert len(left) == room and left.tolist() == sorted(set(left.tolist()))
                        assert end == found[0][1] <= max(room - layers, 0)
                        recent = min(room, layers)
                        assert left[room - recent :].tolist() == list(range(size - recent, size))


def test_two_layers_of_one_ladder_hold_all_text():
    first, second = layers_of(LaCache(budget=60, sinks=2), 100)[:2]
    assert sorted({*first, *second}) == list(range(100))


def test_small_budgets_keep_sinks_and_recent_entries():
    assert layers_of(LaCache(budget=6, sinks=2), 40) == [[0, 1, 36, 37, 38, 39]] * 4
    assert layers_of(LaCache(budget=7, sinks=2), 40)[0][3:] == [36, 37, 38, 39]


def test_layers_that_keep_everything_do_not_count():
    evictor = LaCache(budget=11, sinks=1, skip_layers=1)
    assert evictor.select(prompt(14, 0), (11,)) is None
    reduced = LaCache(budget=11, sinks=1)
    assert kept(evictor, prompt(14, 1)) == kept(reduced, prompt(14, 0, 3))
    # Nor do layers without a cache that the plan may reduce.
    assert kept(reduced, prompt(14, 5, 6, layers=(1, 3, 5))) == kept(reduced, prompt(14, 2, 3))
    assert kept(reduced, prompt(14, 3, 6, layers=(1, 3, 5))) == kept(reduced, prompt(14, 1, 3))


def test_protected_entries_stay_beside_the_ladder():
    protected = torch.zeros(1, 2, 14, dtype=torch.bool)
    protected[..., [2, 3]] = True
    # Of the others, 1 4 | 5 6 | 7 8 are ladders.
    found = layers_of(LaCache(budget=11, sinks=1), 14, protected=protected)
    assert found == [[0, 1, 2, 3, 5, 7, *range(9, 14)], [0, 2, 3, 4, 6, 8, *range(9, 14)]] * 2


def test_a_cursor_is_for_the_entries_that_it_left():
    evictor = LaCache(budget=11, sinks=1)
    ctx = prompt(14)
    first = kept(evictor, ctx)
    assert ctx.state["ladders"].tolist() == [[3, 3]]
    # A view drops nothing, so it begins at the sinks again.
    assert kept(evictor, ctx) == first


def test_padded_rows_equal_rows_alone(model):
    ids, mask = padded_prompt(50, 9)
    with kvsieve.attach(model, kvsieve.plan("lacache", budget=20, sinks=2, every=3)) as sieve:
        together = sieve.generate(ids, mask, max_new_tokens=20, **greedy()).cache
        alone = [sieve.generate(ids[:1], max_new_tokens=20, **greedy()).cache]
        alone.append(sieve.generate(ids[1:, 9:], max_new_tokens=20, **greedy()).cache)
    assert stored(together, (0, 9)) == [stored(cache)[0] for cache in alone]


def test_turns_and_chunks(model):
    """Later prompts are reduced from where the last reduction ended."""
    ids = tiny_prompt(size=90)
    with kvsieve.attach(model, kvsieve.plan("lacache", budget=30, sinks=2)) as sieve:
        cache = sieve.prefill(ids[:, :40])
        sieve.prefill(ids, cache=cache)
        assert stored(sieve.prefill(ids[:, :40], chunk=7)) == stored(sieve.prefill(ids[:, :40]))
    part, cursor = compact(torch.arange(2, 40), 28, 0, 4, (2, 1), 1)
    part, _ = compact(torch.cat([part, torch.arange(40, 90)]), 28, cursor, 4, (2, 1), 1)
    assert stored(cache)[0][1] == [[0, 1, *part.tolist()]] * 2


def test_rerotation_moves_its_keys_together(model):
    with kvsieve.attach(model, kvsieve.plan("rerotation", base="lacache", budget=30)) as sieve:
        result = sieve.generate(tiny_prompt(size=60), max_new_tokens=3, **greedy())
    assert result.stats.kv_entries == [30] * 4


def test_bad_parameters_are_refused(model):
    for given in ({"sinks": -1}, {"span": 0}, {"overlap": -1}, {"span": 3, "overlap": 3}, {"budget": 4}):
        with pytest.raises(PlanError):
            kvsieve.plan("lacache", **given)
    for given, words in (
        ({"span": 4}, "give a span below 4, or leave it out"),
        ({"overlap": 2}, "overlap=2 must be below the span, 2 of this model's 4 layers"),
    ):
        with pytest.raises(PlanError, match=words):
            with kvsieve.attach(model, kvsieve.plan("lacache", budget=20, **given)):
                pass
