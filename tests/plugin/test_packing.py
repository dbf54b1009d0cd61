"""Entries that evictors choose for blocks, and queries that are kept for the end of a prompt."""

from __future__ import annotations

import pytest
import torch

from kvsieve.errors import CacheStateError
from kvsieve.vllm.options import parse_plan
from kvsieve.vllm.packing import LayerFacts, ObservedQueries, choose_entries

HEADS, QUERY_HEADS, DIM = 2, 4, 16
FACTS = LayerFacts(layer_idx=1, num_layers=4, scale=0.25)


def layer(size: int):
    torch.manual_seed(0)
    return torch.randn(40, QUERY_HEADS, DIM), torch.randn(HEADS, size, DIM), torch.randn(HEADS, size, DIM)


@pytest.mark.parametrize(
    "text",
    ["snapkv:window=16:kernel=7", "lagkv:decode=false:lag=16:sinks=4", "keydiff", "knorm", "streamingllm", "rocketkv"],
)
def test_chosen_are_so_many_of_each_head_and_the_tail_stays_where_it_is(text):
    query, keys, values = layer(203)
    chosen = choose_entries(parse_plan(text).evict, FACTS, query, keys, values, 64, 3)
    assert chosen.shape == (HEADS, 64) and (chosen.diff(dim=1) > 0).all() and int(chosen.max()) < 200


def test_scores_are_the_evictors_own():
    query, keys, values = layer(200)
    chosen = choose_entries(parse_plan("knorm").evict, FACTS, query, keys, values, 64, 0)
    assert chosen.equal(keys.norm(dim=-1).topk(64, largest=False).indices.sort().values)
    first_and_last = choose_entries(parse_plan("streamingllm").evict, FACTS, query, keys, values, 64, 8)
    assert first_and_last[0].tolist() == [0, 1, 2, 3, *range(132, 192)]


def test_an_evictor_that_chooses_another_number_is_found_out():
    query, keys, values = layer(40)
    with pytest.raises(CacheStateError, match="gave None"):
        choose_entries(parse_plan("knorm").evict, FACTS, query, keys, values, 40, 0)


def test_queries_of_the_end_are_there_however_a_prompt_is_cut():
    query = torch.randn(100, QUERY_HEADS, DIM)
    for cuts in ([100], [97, 100], [50, 90, 95, 96, 100], [30, 91, 100], [1, 99, 100]):
        queries, start = ObservedQueries(16, 4), 0
        for end in cuts[:-1]:
            queries.see(7, start, query[start:end], 100)
            start = end
        last = queries.last(7, start, query[start:])
        assert last[-16:].equal(query[-16:]), cuts


def test_what_an_aborted_request_left_is_forgotten():
    query = torch.randn(100, QUERY_HEADS, DIM)
    queries = ObservedQueries(16, 4)
    queries.see(7, 0, query[:60], 64)
    queries.see(7, 0, query[:60], 100)
    queries.see(7, 60, query[60:90], 100)
    assert queries.last(7, 90, query[90:])[-16:].equal(query[-16:])
    queries.see(7, 0, query[:60], 64)
    with pytest.raises(CacheStateError, match="queries of 60 tokens"):
        queries.last(7, 62, query[:2])


def test_no_more_is_kept_than_requests_can_be_there():
    queries, query = ObservedQueries(16, 2), torch.randn(60, QUERY_HEADS, DIM)
    for block in range(9):
        queries.see(block, 0, query, 64)
    assert len(queries._held) == 4
