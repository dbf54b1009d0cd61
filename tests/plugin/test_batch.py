"""Steps divided into calls: pages that hold something, rows that read sparsely, and no waiting for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kvsieve
from kvsieve.errors import CacheStateError
from kvsieve_vllm.batch import GroupFacts, StepPlanner
from kvsieve_vllm.graphs import ReplayedSteps
from kvsieve_vllm.pages import PageBounds, choose_pages
from kvsieve_vllm.reading import PageReading
from kvsieve_vllm.retention import BlockRetention

PAGE, WIDTH, DIM = 8, 16, 16


def named(heads: int, kv_heads: int, lengths: torch.Tensor, starts: torch.Tensor):
    return heads, kv_heads, lengths.tolist()


def planner(text: str, *, moved=lambda tensor: tensor, schedule=named, long: int | None = None) -> StepPlanner:
    plan = kvsieve.plan(text)
    retention = None if plan.evict is None else BlockRetention(plan.evict, PAGE)
    reading = None if plan.read is None else PageReading(plan.read, PAGE, DIM, 2)
    facts = GroupFacts(PAGE, 4, 2, reading, retention, long)
    return StepPlanner(facts, moved, schedule)


def step(*requests: tuple[int, int, int]):
    """A step of requests, each with its tokens before it, after it, and of its prompt; request n has pages n00, ..."""
    rows = torch.tensor([0, *(end - start for start, end, _ in requests)]).cumsum(0)
    table = torch.arange(WIDTH, dtype=torch.int32) + 100 * (1 + torch.arange(len(requests), dtype=torch.int32))[:, None]
    return SimpleNamespace(
        num_reqs=len(requests), query_start_loc_cpu=rows, block_table_tensor=table,
        seq_lens_cpu_upper_bound=torch.tensor([end for _, end, _ in requests]),
        rswa_prefix_lens=torch.tensor([prompt for *_, prompt in requests]),
    )  # fmt: skip


def test_a_step_like_any_other_is_left_to_vllm():
    assert planner("knorm:budget=40").rounds(step((0, 40, 60), (3, 4, 3))) is None
    assert planner("quest:budget=32").rounds(step((0, 40, 60), (20, 21, 3))) is None


def test_pages_between_those_that_hold_something_are_left_out():
    (made,) = planner("knorm:budget=40").rounds(step((70, 71, 67), (0, 20, 60), (90, 91, 90)))
    # Of 67 tokens 4 blocks stay, and the 9th goes on; of 90, 4 and those from the 12th on.
    assert made.whole.lengths.tolist() == [4 * 8 + 7, 20, 4 * 8 + 3] and made.whole.longest == (20, 39)
    assert made.whole.table[0, :5].tolist() == [100, 101, 102, 103, 108]
    assert made.whole.table[1, :3].tolist() == [200, 201, 202]
    assert made.whole.table[2, :5].tolist() == [300, 301, 302, 303, 311]
    assert made.whole.schedule == (4, 2, [39, 20, 35]) and made.sparse is None and not made.ends


def test_a_prompts_end_is_packed_and_what_comes_behind_it_is_another_round():
    first, second = planner("snapkv:budget=40:window=6").rounds(step((57, 70, 64), (50, 51, 50)))
    (end,) = first.ends
    assert (end.segment.start, end.segment.end, end.earlier, end.later, end.block) == (57, 64, False, False, -1)
    assert end.packing.pages.tolist() == list(range(100, 108)) and (end.packing.stored, end.packing.kept) == (64, 5)
    assert second.whole.lengths.tolist() == [5 * 8 + 6]
    assert second.whole.table[0, :6].tolist() == [*range(100, 105), 108]
    assert first.rows.tolist() == [*range(7), 13] and second.rows == slice(7, 13)


def test_long_chunks_have_a_call_each_and_the_others_one_together():
    plans = planner("snapkv:budget=40:window=6", long=20)
    (made,) = plans.rounds(step((10, 40, 64), (7, 8, 4), (44, 64, 64), (0, 19, 64)))
    assert [each.segment.rows for each in made.prompts] == [slice(0, 30), slice(31, 51)]
    assert [each.stored for each in made.prompts] == [40, 64]
    assert [each.pages.tolist() for each in made.prompts] == [list(range(100, 105)), list(range(300, 308))]
    assert made.whole.lengths.tolist() == [8, 19] and made.whole.rows.tolist() == [30, *range(51, 70)]
    assert [each.segment.rows for each in made.ends if each.packing is not None] == [slice(31, 51)]
    (alone,) = plans.rounds(step((0, 30, 64)))
    assert alone.whole is None and alone.rest is None and len(alone.prompts) == 1


def test_beside_sparse_readers_long_chunks_keep_their_own_call():
    (made,) = planner("quest:budget=16", long=20).rounds(step((60, 61, 50), (0, 20, 60), (0, 4, 60)))
    assert made.sparse.sizes.tolist() == [61] and made.rest.lengths.tolist() == [4]
    assert [each.segment.rows for each in made.prompts] == [slice(1, 21)] and made.whole is None


def test_queries_are_kept_from_chunk_to_chunk_where_the_last_one_is_short():
    plans = planner("snapkv:budget=40:window=6")
    (end,) = plans.rounds(step((20, 59, 64)))[0].ends
    assert (end.earlier, end.later, end.block, end.packing) == (False, True, 100, None)
    (end,) = plans.rounds(step((59, 64, 64)))[0].ends
    assert (end.earlier, end.later, end.block) == (True, False, 100) and end.packing is not None
    assert plans.rounds(step((0, 20, 64))) is None


def test_queries_are_kept_before_and_across_moments_while_decoding():
    plans = planner("snapkv:budget=40:window=6:every=10")
    ends = [[end for each in plans.rounds(step((at, at + 1, 64))) or [] for end in each.ends] for at in range(63, 96)]
    # Kept behind 69 ... 73 for 74, and so on; the queries that a segment joins are those kept behind the one before it.
    kept = [at for at, found in zip(range(64, 97), ends, strict=True) if found and found[0].later]
    assert kept == [*range(69, 74), *range(79, 84), *range(89, 94)]
    assert [at for at, found in zip(range(63, 96), ends, strict=True) if found and found[0].earlier] == [63, *kept]
    packed = [at for at, found in zip(range(64, 97), ends, strict=True) if found and found[0].packing]
    assert packed == [64, 74, 84, 94]


def test_an_evictor_that_remembers_is_told_of_every_generated_token():
    plans = planner("lagkv:budget=25%:lag=8:sinks=8")
    (end,) = plans.rounds(step((70, 71, 64)))[0].ends
    assert end.block == 100 and end.packing is None
    (end,) = plans.rounds(step((71, 72, 64)))[0].ends
    assert end.packing.kept == 3 and end.packing.stored == 3 * 8 + 8
    assert plans.rounds(step((0, 20, 64))) is None


def test_each_head_of_a_generated_token_is_a_request():
    (made,) = planner("quest:budget=32:page=8").rounds(step((100, 101, 90), (10, 11, 5), (0, 20, 20)))
    assert made.whole is None and made.rest.lengths.tolist() == [20] and made.rest.rows == slice(2, 22)
    sparse = made.sparse
    # Four pages of the first, the last of which has 5 entries, and both of the second.
    assert sparse.counts.tolist() == [4, 2] and sparse.most == 4 and sparse.sizes.tolist() == [101, 11]
    assert sparse.call.lengths.tolist() == [29, 29, 11, 11] and sparse.call.starts.tolist() == [0, 1, 2, 3, 4]
    assert sparse.table.shape == (2, 13) and sparse.call.schedule == (2, 1, [29, 29, 11, 11])


@pytest.mark.parametrize("text", ["quest:budget=32", "hsa:budget=64", "rocketkv:budget=64:window=4", "knorm:budget=40"])
def test_a_generated_token_does_not_wait_for_the_device(text):
    """Tensors without values stand for those of a device: whoever asked for one would be refused."""
    away = torch.device("meta")
    common = step((110, 111, 100), (95, 96, 90), (0, 24, 60), (120, 121, 100))
    common.block_table_tensor = common.block_table_tensor.to(away)
    (made,) = planner(text, moved=lambda tensor: tensor.to(away)).rounds(common)
    assert all(call is None or call.table.device == away for call in (made.whole, made.rest))
    keys = torch.zeros(24, 2, 16, device=away)
    bounds = PageBounds(500, 2, 16, PAGE, keys)
    bounds.update(keys, torch.zeros(24, dtype=torch.int64, device=away))
    sparse = made.sparse
    if sparse is not None:
        query = torch.zeros(3, 2, 2, 16, device=away)
        question = kvsieve.plan(text).read.question(query, 0.25, PAGE, sparse.channels)
        chosen = choose_pages(bounds.table, question, sparse.table, sparse.sizes, sparse.counts, sparse.most, PAGE)
        assert chosen.shape == (3, 2, sparse.most) and chosen.dtype == torch.int32


def replayed(text: str, *, moved=lambda tensor: tensor, longest: int = WIDTH * PAGE) -> ReplayedSteps:
    return ReplayedSteps(planner(text, moved=moved, schedule=lambda *given: None), 3, longest)


def generated(*ends: int, prompt: int = 5):
    """A step of one generated token each, filled up to a graph's size where a request has no tokens."""
    common = step(*((max(end - 1, 0), end, prompt if end else 0) for end in ends))
    given = {"num_actual_tokens": len(ends), "max_query_len": 1, "query_start_loc": common.query_start_loc_cpu.int()}
    return SimpleNamespace(**vars(common), **given, seq_lens=torch.tensor(ends, dtype=torch.int32))


def test_steps_that_are_replayed_have_the_same_tensors():
    """Of 4 pages' budget; the last of them is partly filled, and a request without tokens reads an entry of page 0."""
    steps = replayed("quest:budget=32:page=8")
    first = steps.round(generated(101, 11, 0)).sparse
    assert first.counts.tolist() == [4, 2, 1] and first.call.lengths.tolist() == [29, 29, 11, 11, 1, 1]
    assert first.call.starts.tolist() == [*range(7)] and first.most == 4 and first.channels is None
    again = steps.round(generated(102, 17, 90)).sparse
    assert first.counts.tolist() == [4, 3, 4] and first.call.lengths.tolist() == [30, 30, 17, 17, 26, 26]
    for one, other in ((first.counts, again.counts), (first.call.lengths, again.call.lengths)):
        assert one.data_ptr() == other.data_ptr()
    # A graph of fewer requests.
    assert steps.round(generated(40, 9)).sparse.call.lengths.tolist() == [32, 32, 9, 9]


def test_of_a_share_the_longest_request_decides_how_wide_graphs_are():
    sparse = replayed("quest:budget=50%:page=8").round(generated(60, 16)).sparse
    assert sparse.counts.tolist() == [3, 2] and sparse.most == WIDTH // 2
    # Read whole up to the budget: more pages than are read of any longer request.
    assert replayed("quest:budget=60").round(generated(60, 61)).sparse.counts.tolist() == [8, 3]
    assert replayed("quest:budget=60").round(generated(61)).sparse.most == 8


def test_key_channels_of_each_request_are_told_where_one_has_not_all():
    assert replayed("hsa:budget=16").round(generated(101, 16)).sparse.channels is None
    sparse = replayed("hsa:budget=16", longest=100 * PAGE).round(generated(500, 16)).sparse
    # Of 16 channels 16 * 8 * 16 / 500.
    assert sparse.channels.tolist() == [4, 16] and sparse.counts.tolist() == [2, 2]


def test_layers_that_read_everything_are_replayed_too():
    common = generated(101, 11, 0)
    assert replayed("quest:budget=32").round(common).whole is None
    whole = replayed("quest:budget=32:skip_layers=1").round(common).whole
    assert whole.lengths is common.seq_lens and whole.table is common.block_table_tensor
    assert whole.starts is common.query_start_loc and whole.longest == (1, WIDTH * PAGE)


def test_steps_that_are_not_of_generated_tokens_alone_are_not_replayed():
    steps = replayed("quest:budget=32")
    assert steps.round(generated(20, 9)) is not None
    # The last token of a prompt, unless the step is made up, a chunk beside, and more requests than there is room for.
    assert steps.round(generated(20, 5)) is None and steps.round(generated(20, 5), captured=True) is not None
    assert steps.round(SimpleNamespace(**vars(generated(20, 9)) | {"num_actual_tokens": 4})) is None
    assert steps.round(generated(20, 9, 9, 9)) is None


@pytest.mark.parametrize("text", ["quest:budget=32", "quest:budget=32:page=4:means=true", "hsa:budget=64"])
def test_a_step_that_is_replayed_does_not_wait_for_the_device(text):
    away = torch.device("meta")
    common = generated(110, 96, 0)
    common.block_table_tensor, common.seq_lens = common.block_table_tensor.to(away), common.seq_lens.to(away)
    steps = replayed(text, moved=lambda tensor: tensor.to(away))
    sparse = steps.round(common).sparse
    reading = PageReading(kvsieve.plan(text).read, PAGE, DIM, 2)
    keys = torch.zeros(3, 2, 16, device=away)
    bounds = PageBounds(500, 2, 16, PAGE, keys, parts=reading.parts, means=reading.reader.means)
    bounds.update(keys, torch.zeros(3, dtype=torch.int64, device=away))
    query = torch.zeros(3, 2, 2, 16, device=away)
    asked = reading.reader.question(query, 0.25, bounds.page, sparse.channels)
    numbers = sparse.sizes, sparse.counts, sparse.most
    chosen = choose_pages(bounds.table, asked, sparse.table, *numbers, PAGE, bounds.parts)
    assert chosen.shape == (3, 2, sparse.most) and chosen.dtype == torch.int32


def test_lengths_that_vllm_does_not_tell_are_missed():
    common = step((0, 5, 5))
    common.rswa_prefix_lens = None
    with pytest.raises(CacheStateError, match="no lengths"):
        planner("quest:budget=32").rounds(common)
