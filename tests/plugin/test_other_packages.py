"""Methods of other packages on vLLM's blocks: their traits decide, not their names."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import KNorm, Quest
from kvsieve_vllm.carried import check_carried
from kvsieve_vllm.options import EngineOptions
from kvsieve_vllm.packing import LayerFacts, Offered, choose_entries
from kvsieve_vllm.pages import PageBounds, choose_pages
from kvsieve_vllm.reading import PageReading
from kvsieve_vllm.retention import BlockRetention
from other_packages import OWN, look_for_methods

BLOCK, HEADS, GROUPS, DIM = 8, 2, 3, 16


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    look_for_methods(monkeypatch, OWN)


def test_an_evictor_keeps_blocks():
    evict = kvsieve.plan("own-evictor:budget=40").evict
    keeps = BlockRetention(evict, BLOCK)
    assert keeps.moments(163, 0, 400) == [163] and keeps.gap(163, 163) == (4, 20) and not keeps.remembers
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 4, DIM), torch.randn(HEADS, 163, DIM), torch.randn(HEADS, 163, DIM)
    chosen = choose_entries(evict, LayerFacts(0, 1, 0.25), Offered(query, keys, values), 32, 3)
    assert chosen.equal(values[:, :160].norm(dim=-1).topk(32).indices.sort().values)


def test_a_reader_says_what_pages_are_asked_and_how_many_are_read():
    torch.manual_seed(0)
    options = EngineOptions.given({"kvsieve": "own-reader:entries=24"})
    reading = PageReading.of(options, BLOCK, DIM, 2)
    reading.check()
    assert (reading.read(24, 24).pages, reading.read(90, 90).pages) == (3, 3)
    bounds = PageBounds(12, HEADS, DIM, BLOCK, torch.zeros(1))
    bounds.update(torch.randn(88, HEADS, DIM), torch.arange(8, 96))
    table, size = torch.arange(1, 12, dtype=torch.int32)[None], torch.tensor([88], dtype=torch.int32)
    query = torch.randn(1, HEADS, GROUPS, DIM)
    together = query.mean(2, keepdim=True).expand_as(query)

    def chosen(reader, query):
        asked = reader.question(query, 1.0, BLOCK, None)
        return choose_pages(bounds.table, asked, table, size, torch.tensor([3], dtype=torch.int32), 3, BLOCK)

    quest = Quest(budget=64)
    assert chosen(reading.reader, query).equal(chosen(quest, together))
    assert not chosen(reading.reader, query).equal(chosen(quest, query))


def test_plans_are_carried_by_their_traits():
    check_carried(kvsieve.plan("own-evictor"))
    check_carried(kvsieve.plan("own-reader"))
    with pytest.raises(PlanError, match="It carries .*own-evictor, own-reader, quest, rocketkv, snapkv, streamingllm;"):
        check_carried(kvsieve.plan("fastkv"))


@dataclass(frozen=True, kw_only=True)
class Silent(KNorm):
    """Inherits everything but the traits that a class must say itself."""


@dataclass(frozen=True, kw_only=True)
class Wide(KNorm, heads="all", needs=("rotary",), fixed_counts=True):
    """Looks at what the plugin does not show."""


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        (Silent, ["by the trait fixed_counts"]),
        (Wide, ["all heads of a layer", r"model \(rotary\)"]),
    ],
)
def test_evictors_whose_traits_do_not_fit_are_refused(kind, reasons):
    for reason in reasons:
        with pytest.raises(PlanError, match=reason):
            check_carried(kvsieve.Plan(evict=kind(budget=64)))


def test_a_reader_whose_layers_differ_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class ByLayer(Quest):
        def setting(self, facts):
            return super().setting(facts) if facts.layer_idx else self.parameters(512, facts)

    with pytest.raises(PlanError, match="ByLayer: layers differ"):
        PageReading(ByLayer(budget=256), BLOCK, DIM, 2).check()
