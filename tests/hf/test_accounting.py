"""What statistics tell of traffic and memory is what is touched and held: counted here without kvsieve's own books."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvsieve
from kvsieve.hf.forward import session
from kvsieve.methods import HSA, Quest, SparQ
from kvsieve.planning.plans import Plan
from tiny import greedy, tiny_prompt

GREEDY = greedy()
LENGTH, NEW = 150, 9

READ = {
    "full": kvsieve.plan("full"),
    "snapkv": kvsieve.plan("snapkv", budget=40, window=4),
    "hsa": kvsieve.plan("hsa", budget=16),
    "quest": kvsieve.plan("quest", budget=24),
    "means of quest": kvsieve.plan("quest", budget=24, page=5, means=True),
    "quest original": kvsieve.plan("quest", budget=16, page=4, per_query_head=True),
    "sparq": kvsieve.plan("sparq", budget=32),
    "sparq original": kvsieve.plan("sparq", budget=32, per_query_head=True, mean_value=False),
    "exacttopk": kvsieve.plan("exacttopk", budget=16),
    "rocketkv": kvsieve.plan("rocketkv", budget=16, window=4, kernel=5),
    "rocketkv-mt": kvsieve.plan("rocketkv-mt", budget=16, window=4, kernel=5),
    "perturn": kvsieve.plan("perturn", budget=20, base="knorm"),
    "tova + hsa": Plan(evict=kvsieve.plan("tova", budget=60).evict, read=HSA(budget=16)),
    "h2o + sparq": Plan(evict=kvsieve.plan("h2o", budget=60).evict, read=SparQ(budget=16)),
    "adakv + quest": Plan(evict=kvsieve.plan("adakv", budget=40, window=4).evict, read=Quest(budget=16)),
}


def prompt(rows=2):
    return tiny_prompt(rows, LENGTH, seed=3)


def padded():
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    return ids, mask


class Touched(TorchDispatchMode):
    """Bytes that operations read of the memory at `watched()`: of what they pick, what they give; else all they get."""

    PICKS = ("index_select", "gather", "index", "embedding")

    def __init__(self, watched):
        super().__init__()
        self.watched = watched
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return out
        watched = self.watched()
        named = [*zip(schema.arguments, args, strict=False)]
        named += [(each, kwargs[each.name]) for each in schema.arguments if each.name in kwargs]
        for argument, value in named:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(tensor, torch.Tensor) or written:
                    continue
                if tensor.untyped_storage().data_ptr() not in watched:
                    continue
                picked = func.overloadpacket.__name__ in self.PICKS
                sizes = zip(tensor.shape, tensor.stride(), strict=True)
                size = out.numel() if picked else math.prod(count for count, stride in sizes if stride)
                self.bytes += size * tensor.element_size()
        return out


def remembered(store):
    """The tables of pages that readers keep of a store."""
    kv_rows = store.derived.get("kv_rows")
    groups = [] if kv_rows is None else kv_rows.grouped.groups
    return [
        part for group in groups for name, table in group.state.items() if name == "pages" for part in table.tensors()
    ]


@pytest.mark.parametrize("given", [lambda: (prompt(), None), padded], ids=["equal", "padded"])
@pytest.mark.parametrize("name", READ)
def test_bytes_told_are_bytes_touched(model, monkeypatch, name, given):
    """Keys, values and tables that the tokens of an answer read, and those read to make the tables."""
    counted = 0
    reading = session.read_token

    def watching(reader, cache, layer, *args):
        nonlocal counted

        def watched():
            store = layer.store
            parts = [*store.buffers()[:2], *remembered(store)]
            return {part.untyped_storage().data_ptr() for part in parts}

        with Touched(watched) as touched:
            out = reading(reader, cache, layer, *args)
        counted += touched.bytes
        return out

    monkeypatch.setattr(session, "read_token", watching)
    ids, mask = given()
    with kvsieve.attach(model, READ[name]) as sieve:
        result = sieve.generate(ids, mask, max_new_tokens=NEW, **GREEDY)
    traffic, reads = result.stats.traffic, result.cache.turn.record.reads
    assert traffic.tokens == NEW - 1
    assert reads.entry_bytes + reads.estimate_bytes + reads.upkeep_bytes == counted > 0
    told = traffic.bytes + traffic.estimate_bytes + traffic.upkeep_bytes
    assert told == pytest.approx(counted / (traffic.tokens * len(ids)), abs=2)
    assert bool(traffic.upkeep_bytes) == (
        name.split()[-1] in ("hsa", "quest", "sparq", "rocketkv", "rocketkv-mt", "original")
    )


def test_reading_that_costs_more_than_everything_says_so(model):
    noted = {}
    for name in ("hsa", "h2o + sparq"):
        with kvsieve.attach(model, READ[name]) as sieve:
            noted[name] = sieve.generate(prompt(), max_new_tokens=NEW, **GREEDY)
    reads = noted["h2o + sparq"].cache.turn.record.reads
    assert reads.all_bytes > reads.whole_bytes and noted["h2o + sparq"].stats.applied
    assert "cost more than reading everything would have" in noted["h2o + sparq"].stats.notes[0]
    assert not noted["hsa"].stats.notes


def test_tables_that_evictions_throw_away_cost_what_making_them_anew_costs(model):
    """Behind an evictor that acts on every token, HSA reads every key for every token."""
    with kvsieve.attach(model, READ["tova + hsa"]) as sieve:
        each_time = sieve.generate(prompt(), max_new_tokens=NEW, **GREEDY).stats.traffic
    with kvsieve.attach(model, READ["hsa"]) as sieve:
        once = sieve.generate(prompt(), max_new_tokens=40, **GREEDY).stats.traffic
    assert each_time.upkeep_entries == pytest.approx(61 / 2, abs=0.5)
    # The prompt's keys once, then one key, and the page it goes to, per token.
    assert (LENGTH / 2) / 39 <= once.upkeep_entries <= (LENGTH / 2) / 39 + 1.5


STATES = {
    **READ,
    "h2o": kvsieve.plan("h2o", budget=40),
    "snapkv every": kvsieve.plan("snapkv", budget=40, window=4, every=3),
    "adakv": kvsieve.plan("adakv", budget=40, window=4),
    "expectedattention": kvsieve.plan("expectedattention", budget=40),
    "lagkv": kvsieve.plan("lagkv", budget=60, lag=8, sinks=2),
    "gemfilter": kvsieve.plan("gemfilter", budget=60, layer=1),
    "squeezeattention": kvsieve.plan("squeezeattention", budget=40),
    "fastkv": kvsieve.plan("fastkv", budget=40, window=4, tsp_layer=1, tsp_rate=0.5),
}


def held_by(value, found, seen):
    """Collect {address: bytes} of the storages of all tensors that an object leads to; plans and models are no part."""
    if id(value) in seen or isinstance(value, (Plan, torch.nn.Module, str, bytes, int, float, type(None))):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict):
        for part in value.values():
            held_by(part, found, seen)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            held_by(part, found, seen)
    elif type(value).__module__.startswith(("kvsieve", "transformers")) and hasattr(value, "__dict__"):
        held_by(vars(value), found, seen)


@pytest.mark.parametrize("name", STATES)
def test_bytes_of_a_cache_are_those_of_every_tensor_it_leads_to(model, name):
    ids, mask = padded()
    with kvsieve.attach(model, STATES[name]) as sieve:
        result = sieve.generate(ids, mask, max_new_tokens=NEW, **GREEDY)
        kept = sieve.generate(ids, mask, protect=[(0, 5)], max_new_tokens=3, **GREEDY).cache
    for cache in (result.cache, kept):
        found: dict[int, int] = {}
        held_by(vars(cache), found, set())
        assert cache.nbytes() == sum(found.values())
    assert result.stats.kv_bytes == result.cache.nbytes()
    assert result.stats.storage.bytes + result.stats.storage.metadata_bytes == result.stats.kv_bytes


def test_scratch_of_methods_and_views_is_part_of_the_bytes(model):
    """What H2O sums up, the queries that SnapKV keeps while decoding, and the view of RocketKV-MT, are told."""
    ids = prompt()
    for name, least in (("h2o", 2 * 40 * 2 * 8), ("snapkv every", 2 * 4 * 16 * 8), ("rocketkv-mt", 2 * 2 * 8 * 16)):
        with kvsieve.attach(model, STATES[name]) as sieve:
            cache = sieve.generate(ids, max_new_tokens=NEW, **GREEDY).cache
        stores = sum(layer.store.nbytes() for layer in cache.sieve_layers.values())
        assert cache.nbytes() >= stores + least * len(cache.layers), name


def test_chunks_that_wait_are_part_of_the_bytes(model):
    """Under deferred propagation what leaves the source layer waits for the last chunk."""
    sizes = []
    with kvsieve.attach(model, STATES["fastkv"]) as sieve:
        cache = sieve.new_cache()

        def watch(done, total):
            found: dict[int, int] = {}
            held_by(vars(cache), found, set())
            sizes.append((cache.nbytes(), sum(found.values()), len(cache.turn.deferred)))

        sieve.prefill(prompt(), cache=cache, chunk=40, progress=watch)
    assert max(waiting for _, _, waiting in sizes) >= 2 and all(told == real for told, real, _ in sizes)


def test_what_is_kept_for_later_is_told_once(model):
    """A fork that shares its buffers holds them as well; a cache does not count the same memory twice."""
    with kvsieve.attach(model, READ["hsa"]) as sieve:
        cache = sieve.prefill(prompt())
        assert cache.fork(share=True).nbytes() == cache.nbytes() == cache.fork().nbytes()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("full", "torch (Triton: it is for GPUs; C, few tokens: it is for CPUs, in bfloat16; C: it is for CPUs, in "),
        ("quest", "group by group (C, in one call: in torch.float64)"),
    ],
)
def test_statistics_name_the_executors_that_ran_and_why_no_faster_one_did(model, name, answer):
    with kvsieve.attach(model, READ[name]) as sieve:
        found = sieve.generate(prompt(1), max_new_tokens=3, **GREEDY).stats.executors
    assert [sum(found[phase].values()) for phase in ("prompt", "answer")] == [model.config.num_hidden_layers] * 2
    assert all(each.startswith(answer) for each in found["answer"])
