"""Entries that evictors choose for blocks, and queries that are kept for the end of a prompt."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import CacheStateError
from kvsieve_vllm.packing import EvictorStates, LayerFacts, ObservedQueries, Offered, choose_entries

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
    chosen = choose_entries(kvsieve.plan(text).evict, FACTS, Offered(query, keys, values), 64, 3)
    assert chosen.shape == (HEADS, 64) and (chosen.diff(dim=1) > 0).all() and int(chosen.max()) < 200


def test_scores_are_the_evictors_own():
    query, keys, values = layer(200)
    chosen = choose_entries(kvsieve.plan("knorm").evict, FACTS, Offered(query, keys, values), 64, 0)
    assert chosen.equal(keys.norm(dim=-1).topk(64, largest=False).indices.sort().values)
    first_and_last = choose_entries(kvsieve.plan("streamingllm").evict, FACTS, Offered(query, keys, values), 64, 8)
    assert first_and_last[0].tolist() == [0, 1, 2, 3, *range(132, 192)]


def test_an_evictor_that_chooses_another_number_is_found_out():
    query, keys, values = layer(40)
    with pytest.raises(CacheStateError, match="gave None"):
        choose_entries(kvsieve.plan("knorm").evict, FACTS, Offered(query, keys, values), 40, 0)


def test_queries_of_the_end_are_there_however_a_request_is_cut():
    query = torch.randn(100, QUERY_HEADS, DIM)
    for cuts in ([97, 100], [90, 95, 96, 100], [91, 100], [99, 100]):
        queries, start, joined = ObservedQueries(16, 4), 0, query[:0]
        for end in cuts:
            joined = queries.joined(7, start, query[start:end]) if start else query[:end]
            queries.hold(7, end, joined)
            start = end
        assert joined[-16:].equal(query[-16:]), cuts


def test_what_an_aborted_request_left_is_forgotten():
    query = torch.randn(100, QUERY_HEADS, DIM)
    queries = ObservedQueries(16, 4)
    queries.hold(7, 60, query[:60])
    queries.hold(7, 90, query[60:90])
    assert queries.joined(7, 90, query[90:])[-16:].equal(query[-16:])
    queries.hold(7, 60, query[:60])
    with pytest.raises(CacheStateError, match="queries of 60 tokens"):
        queries.joined(7, 62, query[:2])


def test_no_more_is_kept_than_requests_can_be_there():
    queries, states, query = ObservedQueries(16, 2), EvictorStates(2), torch.randn(60, QUERY_HEADS, DIM)
    for block in range(9):
        queries.hold(block, 60, query)
        states.of(block, True)["seen"] = block
    assert len(queries._held) == 4
    assert [states.of(block, False) for block in (5, 4, 8)] == [{"seen": 5}, {}, {"seen": 8}]


def test_a_state_lasts_from_a_prompts_end_on():
    states = EvictorStates(2)
    states.of(3, True)["seen"] = 1
    assert states.of(3, False) == {"seen": 1}
    assert states.of(3, True) == {} == states.of(3, False)


def test_lagkv_goes_on_from_the_scores_that_it_gave():
    """Two partitions more: what stays is what an evictor chooses that has seen the request all along."""
    evict, state = kvsieve.plan("lagkv:lag=16:sinks=16:budget=64").evict, {}
    query, keys, values = layer(224)
    chosen = choose_entries(evict, FACTS, Offered(query, keys[:, :192], values[:, :192], state), 64, 0)
    assert state["judged"].sum() == 64 - 16 - 16
    for end in (208, 224):
        new = torch.arange(end - 16, end).expand(HEADS, -1)
        held = torch.cat([chosen, new], 1)
        offered = [each.gather(1, held[..., None].expand(-1, -1, DIM)) for each in (keys, values)]
        chosen = held.gather(1, choose_entries(evict, FACTS, Offered(query[:1], *offered, state, False), 64, 0))
        assert chosen[:, -16:].equal(new) and chosen[:, :16].equal(torch.arange(16).expand(HEADS, -1))
        # Scored once, in the order of the request.
        assert (chosen.diff(dim=1) > 0).all() and state["judged"].sum() == 64 - 16 - 16
