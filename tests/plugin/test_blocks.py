"""Blocks that eviction keeps and frees: numbers that scheduler and workers work out alike, and steps cut by them."""

from __future__ import annotations

import random

import pytest

import kvsieve
from kvsieve.errors import PlanError
from kvsieve_vllm.retention import BlockRetention
from kvsieve_vllm.rounds import ScheduledTokens, joined, rounds_of

BLOCK = 8


def retention(text: str, block: int = BLOCK, **given) -> BlockRetention:
    return BlockRetention(kvsieve.plan(text).evict, block, **given)


def test_whole_blocks_fill_the_budget_with_the_last_one():
    keeps = retention("knorm:budget=40")
    assert [keeps.kept_blocks(prompt) for prompt in (160, 161, 167)] == [5, 4, 4]
    assert retention("knorm:budget=25%").kept_blocks(160) == 5
    # The evictor's least: a window of 32 and one more.
    assert retention("snapkv:budget=1%:paper=true").kept_blocks(160) == 5
    assert retention("knorm:budget=1").kept_blocks(163) == 1


def test_a_budget_that_no_block_fits_into_is_refused():
    for text in ("knorm:budget=8", "snapkv:budget=1%:paper=true"):
        retention(text).check()
    with pytest.raises(PlanError, match="KNorm: a budget of 7 entries has no room .* of 8; raise budget= to 8"):
        retention("knorm:budget=7").check()


def test_a_gap_opens_once_the_prompt_is_processed():
    keeps = retention("knorm:budget=40")
    assert [keeps.gap(163, processed) for processed in (0, 100, 162)] == [(0, 0)] * 3
    assert [keeps.gap(163, processed) for processed in (163, 164, 900)] == [(4, 20)] * 3
    assert keeps.stored(163, 170) == 170 - 16 * BLOCK
    assert keeps.gap(30, 900) == (0, 0)


def test_a_gap_grows_while_decoding():
    rolls = retention("streamingllm:budget=40:every=16")
    assert [rolls.gap(163, processed) for processed in (163, 178, 179, 195)] == [(4, 20), (4, 20), (4, 22), (4, 24)]
    # A short prompt has no gap until its answer is long.
    assert [rolls.gap(20, processed) for processed in (20, 35, 36, 52)] == [(0, 0), (0, 0), (0, 0), (4, 6)]
    assert rolls.moments(163, 0, 200) == [163, 179, 195]
    assert rolls.moments(20, 0, 60) == [52]
    assert rolls.moments(163, 179, 195) == [195] and rolls.moments(163, 179, 194) == []


def test_lagkv_acts_where_a_partition_has_filled():
    keeps = retention("lagkv:lag=16:sinks=4:budget=25%")
    # Partitions end at 4 + 16 n; of 163 tokens 5 blocks stay, 41 entries being the budget and 36 the least.
    assert keeps.kept_blocks(163) == 5 and keeps.remembers
    # At 164 there is no block to be freed.
    assert keeps.moments(163, 0, 200) == [163, 180, 196]
    assert [keeps.gap(163, processed) for processed in (163, 164, 179, 180, 196)] == [
        (5, 20), (5, 20), (5, 20), (5, 22), (5, 24),
    ]  # fmt: skip
    once = retention("lagkv:lag=16:sinks=4:budget=25%:decode=false")
    assert once.moments(163, 0, 200) == [163] and not once.remembers


def test_queries_of_the_tokens_before_a_moment_are_wanted():
    keeps = retention("snapkv:budget=40:window=6:every=10")
    assert [at for at in range(130) if keeps.wants_queries(100, at)] == [
        *range(95, 100), *range(105, 110), *range(115, 120), *range(125, 130),
    ]  # fmt: skip
    assert not any(retention("snapkv:budget=40:window=6").wants_queries(100, at) for at in range(100, 130))
    assert all(retention("snapkv:budget=40:window=6:every=3").wants_queries(4, at) for at in range(1, 30))


@pytest.mark.parametrize(
    "text",
    [
        "knorm:budget=40",
        "snapkv:budget=30%:paper=true",
        "keydiff:budget=25%:every=5",
        "snapkv:budget=40:window=6:every=10",
        "lagkv:budget=25%:lag=16:sinks=4",
    ],
)
def test_what_is_freed_holds_nothing_that_is_read_later(text):
    """Pages are filled and packed as workers do, and freed as the scheduler does, however a request is cut up."""
    rng, keeps = random.Random(0), retention(text)
    for _ in range(60):
        prompt, length = rng.randrange(1, 200), 260
        at, held = 0, set()
        while at < length:
            freed_to = keeps.gap(prompt, at)
            end = min(at + (rng.randrange(1, 90) if at < prompt or rng.random() < 0.2 else 1), length)
            held |= set(range(-(-end // BLOCK)))
            held -= set(range(*freed_to))
            for (segment,) in rounds_of([ScheduledTokens(0, 0, at, end, prompt)], keeps):
                first, behind = keeps.gap(prompt, segment.start)
                pages = [page for page in range(-(-segment.end // BLOCK)) if not first <= page < behind]
                assert held.issuperset(pages)
                assert segment.end - (behind - first) * BLOCK <= len(pages) * BLOCK
                if segment.packs:
                    # Kept entries come from the whole pages that are there, and go to the first of them.
                    kept, after = keeps.gap(prompt, segment.end)
                    assert kept == keeps.kept_blocks(prompt) and after == segment.end // BLOCK
                    assert len([page for page in pages if page < after]) > kept
            at = end


def test_a_step_is_cut_where_a_resumed_answer_begins():
    keeps = retention("knorm:budget=40")
    step = [(0, 0, 170, 171, 163), (1, 1, 64, 180, 163), (2, 117, 0, 50, 99)]
    first, second = rounds_of([ScheduledTokens(*each) for each in step], keeps)
    ends = [(part.start, part.end, part.packs) for part in first]
    assert ends == [(170, 171, False), (64, 163, True), (0, 50, False)]
    assert [(part.request.number, part.start, part.end, part.packs) for part in second] == [(1, 163, 180, False)]
    assert [part.rows for part in first] == [slice(0, 1), slice(1, 100), slice(117, 167)]
    assert second[0].rows == slice(100, 117)
    assert [part.decodes for part in first] == [True, False, False]
    assert joined([part.rows for part in first[:2]]) == slice(0, 100)
    assert joined([slice(0, 2), slice(5, 7)]) == [0, 1, 5, 6]


def test_tokens_of_an_answer_that_is_read_again_are_read_one_by_one():
    rounds = rounds_of([ScheduledTokens(0, 0, 90, 103, 100), ScheduledTokens(1, 13, 7, 8, 5)], None, singly=True)
    assert [[(part.start, part.end, part.decodes) for part in each] for each in rounds] == [
        [(90, 100, False), (7, 8, True)],
        [(100, 101, True)],
        [(101, 102, True)],
        [(102, 103, True)],
    ]


def test_a_prompt_of_one_token_is_no_generated_one():
    (((segment,)),) = (rounds_of([ScheduledTokens(0, 0, 98, 99, 99)], None),)
    assert not segment[0].decodes


def test_in_a_self_test_everything_stays():
    keeps = retention("knorm:budget=1", self_test=True)
    assert keeps.gap(163, 400) == (0, 0) and keeps.moments(163, 0, 163) == [163] and keeps.kept_blocks(163) == 20
    assert keeps.moments(5, 0, 9) == []
