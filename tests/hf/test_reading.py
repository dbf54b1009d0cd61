"""Sparse reading inside a model: the laws that hold for every reader, on every store."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.cache.tensors import storage_bytes
from kvsieve.core.kv_rows import ReadFacts
from kvsieve.errors import PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.request import PassRequest
from kvsieve.kernels.cpu import reading
from kvsieve.kernels.cpu.build import Library
from kvsieve.methods import HSA, PerTurn, Quest, RocketEviction, SnapKV
from kvsieve.planning.roles import Reader
from kvsieve.shared.prompt import next_logits
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build
from toy_chats import chat_tokenizer

READERS = {
    "exacttopk": {"budget": 16},
    "quest": {"budget": 16},
    "quest means": {"budget": 16, "page": 4, "means": True},
    "quest original": {"budget": 16, "page": 4, "per_query_head": True, "skip_layers": 1},
    "sparq": {"budget": 16},
    "hsa": {"budget": 16},
    "rocketkv": {"budget": 16, "window": 4, "kernel": 5},
    "rocketkv-mt": {"budget": 16, "window": 4, "kernel": 5},
    "perturn": {"budget": 20, "base": "knorm"},
    "loki": {"budget": 16},
    "loki original": {"budget": 20, "part": 0.25, "per_query_head": True},
    "clusterkv": {"budget": 24, "sinks": 2, "per_cluster": 8, "chunk_length": 4},
    "clusterkv original": {"budget": 24, "sinks": 2, "per_cluster": 8, "per_query_head": True, "skip_layers": 1},
    "quest shared": {"budget": 16, "share": 2},
    "quest original, shared": {"budget": 16, "page": 4, "per_query_head": True, "share": "0/1"},
    "sparq shared": {"budget": 16, "share": 3},
    "hsa shared": {"budget": 16, "share": 4, "skip_layers": 1},
    "rocketkv shared": {"budget": 16, "window": 4, "kernel": 5, "share": 2},
    "rocketkv-mt shared": {"budget": 16, "window": 4, "kernel": 5, "share": 2},
    "loki shared": {"budget": 16, "share": 2},
    "clusterkv shared": {"budget": 24, "sinks": 2, "per_cluster": 8, "share": 2},
    "kascade": {"budget": 16},
}
# Layers before and after a filter attend to everything by themselves; scores are those of passes.
LAYERED = {
    "omnikv": {"budget": 16, "share": "1", "wait": 0},
    "omnikv wait": {"budget": 16, "share": "0", "wait": 1},
    "infllm": {"budget": 20, "local": 6, "block": 3, "representatives": 2},
    "infllm shared": {"budget": 20, "sinks": 1, "share": 2},
}
GREEDY = greedy()


def planned(name):
    return kvsieve.plan(name.split()[0], **{**READERS, **LAYERED}[name])


def prompt(rows=1, size=90, seed=3):
    return tiny_prompt(rows, size, seed=seed)


def answer_logits(model, plan, ids, answer, mask=None, chunk=None, at_once=False):
    """Logits [B, T, V] of an answer's tokens, given one by one, or at once as an answer."""
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = sieve.prefill(ids, mask, chunk=chunk)
        if at_once:
            given = PassRequest(phase="decode")
            return sieve.feed(cache, answer, None, given, logits=answer.shape[1]).logits, cache
        parts = []
        for column in answer.T:
            ids = torch.cat([ids, column[:, None]], 1)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(column[:, None])], 1)
            parts.append(next_logits(sieve, cache, ids, mask))
        return torch.cat(parts, 1), cache


@pytest.mark.parametrize("name", READERS)
def test_reading_all_pages_is_dense(model, name):
    ids, answer = prompt(), prompt(size=6, seed=4)
    plan = planned(name)
    dense, _ = answer_logits(model, kvsieve.plan("full"), ids, answer)
    # Read as if the budget were not enough, and then all of it.
    if plan.read is not None:
        everything = dataclasses.replace(plan.read, budget=kvsieve.Budget(tokens=400), skip_layers=0)
        plan = kvsieve.Plan(read=_Always(everything))
        ours, cache = answer_logits(model, plan, ids, answer)
        assert cache.turn.record.reads.sparse
    else:
        ours, _ = answer_logits(model, kvsieve.plan("perturn", budget=400, base="knorm"), ids, answer)
    torch.testing.assert_close(ours, dense)


@dataclasses.dataclass(frozen=True)
class _Always(Reader):
    """A reader that chooses although all would fit, as many entries as there are."""

    inner: object
    sparse_questions: bool = False

    def setting(self, facts):
        return dataclasses.replace(self.inner.setting(facts), count=1000, tokens=16)

    def reads_all(self, setting, size):
        return False

    def choose(self, asked, kv_rows, state, setting):
        setting = dataclasses.replace(setting, count=kv_rows.size)
        return self.inner.choose(asked, kv_rows, state, setting)


@pytest.mark.parametrize("name", [*READERS, *LAYERED])
def test_padded_rows_read_as_they_would_alone(model, name):
    ids, answer, plan = prompt(3), prompt(3, 7, seed=5), planned(name)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 11, 23)):
        mask[row, :padding] = 0
    ours, _ = answer_logits(model, plan, ids, answer, mask)
    for row in range(3):
        alone, _ = answer_logits(model, plan, ids[row : row + 1, mask[row].bool()], answer[row : row + 1])
        torch.testing.assert_close(ours[row : row + 1], alone)


@pytest.mark.parametrize("name", [*READERS, *LAYERED])
def test_an_answer_at_once_reads_as_token_by_token(model, name):
    ids, answer, plan = prompt(2), prompt(2, 9, seed=6), planned(name)
    single, one = answer_logits(model, plan, ids, answer)
    several, other = answer_logits(model, plan, ids, answer, at_once=True)
    torch.testing.assert_close(several, single)
    # Layers that are read whole have executors for several tokens.
    reads = [dataclasses.replace(cache.turn.record.reads, executors={}) for cache in (one, other)]
    assert reads[0] == reads[1]
    chunked, _ = answer_logits(model, plan, ids, answer, chunk=17)
    torch.testing.assert_close(chunked, single)


@pytest.mark.parametrize("name", [*READERS, *LAYERED])
def test_less_is_read_and_it_matters(model, name):
    ids, plan = prompt(), planned(name)
    with kvsieve.attach(model, plan) as sieve:
        stats = sieve.generate(ids, max_new_tokens=8, **GREEDY).stats
    assert stats.applied and not [note for note in stats.notes if "all of what is stored" in note]
    assert stats.traffic.tokens == 7
    ours, _ = answer_logits(model, plan, ids, prompt(size=4, seed=4))
    dense, _ = answer_logits(model, kvsieve.plan("full"), ids, prompt(size=4, seed=4))
    assert not torch.allclose(ours, dense)


@pytest.mark.parametrize("evict", ["snapkv", "adakv", "streamingllm", "lagkv", "fastkv"])
@pytest.mark.parametrize("reader", [HSA(budget=16), Quest(budget=16, page=3)], ids=["hsa", "quest"])
def test_after_any_evictor_all_that_is_left_may_be_read(model, evict, reader):
    """Reading everything that an evictor leaves, dense or ragged, while it evicts on, is that evictor alone."""
    given = {"budget": 30, "window": 4} if evict in ("snapkv", "adakv", "fastkv") else {"budget": 40}
    given |= {"lag": 8, "sinks": 2} if evict == "lagkv" else {"every": 3} if evict == "streamingllm" else {}
    given |= {"tsp_layer": 1, "tsp_rate": 0.5} if evict == "fastkv" else {}
    alone = kvsieve.plan(evict, **given)
    ids, answer = prompt(2), prompt(2, 9, seed=6)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    wanted, _ = answer_logits(model, alone, ids, answer, mask)
    ours, cache = answer_logits(model, dataclasses.replace(alone, read=_Always(reader), name=""), ids, answer, mask)
    torch.testing.assert_close(ours, wanted)
    assert cache.turn.record.reads.sparse
    less, _ = answer_logits(model, dataclasses.replace(alone, read=reader, name=""), ids, answer, mask)
    assert not torch.allclose(less, wanted)


def test_a_view_is_the_eviction_that_later_turns_do_not_feel(model):
    """One turn under PerTurn answers as after the eviction itself; the next one has everything again."""
    base = SnapKV(budget=24, window=4)
    first, second, answer = prompt(2), prompt(2, 30, seed=7), prompt(2, 5, seed=8)
    evicted, _ = answer_logits(model, kvsieve.Plan(evict=base), first, answer)
    viewed, cache = answer_logits(model, kvsieve.Plan(evict=PerTurn(base=base)), first, answer)
    torch.testing.assert_close(viewed, evicted)
    assert cache.entries() == [95] * len(cache.layers)
    # The second turn's view is chosen from both turns, by its own window: what was not read in the first is there.
    whole, one = torch.cat([first, second], 1), prompt(2, 1, seed=9)
    with kvsieve.attach(model, kvsieve.Plan(evict=PerTurn(base=base))) as sieve, torch.no_grad():
        cache = sieve.prefill(first)
        cache = sieve.prefill(whole, cache=cache)
        then = next_logits(sieve, cache, torch.cat([whole, one], 1))[:, -1]
    wanted, _ = answer_logits(model, kvsieve.Plan(evict=base), whole, one)
    torch.testing.assert_close(then, wanted[:, -1])


def test_a_view_ends_with_its_turn(model):
    """A turn that the plan is not to act on reads everything, not what an earlier turn chose."""
    ids, whole, one = prompt(2), torch.cat([prompt(2), prompt(2, 9, seed=6)], 1), prompt(2, 1, seed=9)
    with kvsieve.attach(model, planned("perturn")) as sieve, torch.no_grad():
        cache = sieve.prefill(whole, cache=sieve.prefill(ids), reduce=False)
        then = next_logits(sieve, cache, torch.cat([whole, one], 1))
    wanted, _ = answer_logits(model, kvsieve.plan("full"), whole, one)
    torch.testing.assert_close(then, wanted)


def test_rocketkv_mt_in_its_first_turn_is_rocketkv(model):
    ids, answer = prompt(2), prompt(2, 9, seed=6)
    once, _ = answer_logits(model, planned("rocketkv"), ids, answer)
    multi, cache = answer_logits(model, planned("rocketkv-mt"), ids, answer)
    torch.testing.assert_close(multi, once)
    assert cache.entries() == [99] * len(cache.layers)


@pytest.mark.parametrize("name", [*READERS, *LAYERED])
def test_forks_rollbacks_and_beams_read_alike(model, name):
    ids, answer, plan = prompt(2), prompt(2, 6, seed=6), planned(name)
    wanted, _ = answer_logits(model, plan, ids, answer)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = sieve.prefill(ids)
        fed = ids
        for column in answer.T[:3]:
            fed = torch.cat([fed, column[:, None]], 1)
            next_logits(sieve, cache, fed)
        taken, fork = cache.snapshot(), cache.fork()
        next_logits(sieve, cache, torch.cat([fed, prompt(2, 1, seed=9)], 1))
        cache.rollback(taken)
        cache.reorder_cache(torch.tensor([1, 0]))
        for held, rows in ((fork, [0, 1]), (cache, [1, 0])):
            whole, parts = fed[rows], []
            for column in answer.T[3:]:
                whole = torch.cat([whole, column[rows, None]], 1)
                parts.append(next_logits(sieve, held, whole))
            torch.testing.assert_close(torch.cat(parts, 1), wanted[rows, 3:])
        out = sieve.generate(ids, max_new_tokens=4, num_beams=3, **GREEDY)
        assert out.sequences.shape == (2, 94)


def test_a_question_may_be_read_sparsely_too(model):
    ids, question = prompt(2), prompt(2, 8, seed=6)
    whole = torch.cat([ids, question], 1)
    token = prompt(2, 1, seed=9)
    for questions in (False, True):
        # Pages that do not depend on the length of the prompt.
        plan = kvsieve.plan("quest", budget=16, page=4, sparse_questions=questions)
        with kvsieve.attach(model, plan) as sieve, torch.no_grad():
            cache = sieve.prefill(ids)
            cache = sieve.prefill(whole, cache=cache, reduce=False)
            assert cache.turn.record.reads.tokens == (8 if questions else 0)
            ours = next_logits(sieve, cache, torch.cat([whole, token], 1))
        if questions:
            wanted, _ = answer_logits(model, plan, ids, torch.cat([question, token], 1))
            torch.testing.assert_close(ours[:, -1], wanted[:, -1])


def test_a_budget_that_holds_everything_reads_densely_and_says_so(model):
    ids = prompt()
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        wanted = sieve.generate(ids, max_new_tokens=6, **GREEDY)
    with kvsieve.attach(model, kvsieve.plan("hsa", budget=512)) as sieve:
        got = sieve.generate(ids, max_new_tokens=6, **GREEDY)
    assert torch.equal(got.sequences, wanted.sequences) and not got.stats.applied
    assert any("not more than the budget" in note for note in got.stats.notes)
    assert got.stats.traffic == wanted.stats.traffic


def test_a_page_that_is_too_long_is_refused_and_the_cache_stays_usable(model):
    ids = prompt()
    with kvsieve.attach(model, kvsieve.plan("quest", budget="25%", page=64)) as sieve:
        cache = sieve.prefill(ids)
        taken = cache.snapshot()
        whole = torch.cat([ids, prompt(size=5, seed=6)], 1)
        with pytest.raises(PlanError, match="a page of 64 entries does not fit the budget of 24 that 25% of 98 tokens"):
            sieve.generate(whole, cache=cache, max_new_tokens=3, **GREEDY)
        cache.rollback(taken)
    with kvsieve.attach(model, kvsieve.plan("quest", budget="25%", page=8)) as sieve:
        sieve.adopt(cache)
        assert sieve.generate(whole, cache=cache, max_new_tokens=3, **GREEDY).stats.traffic.entries == 24


@pytest.mark.parametrize("way", ["generate", "padded", "chat", "later turn"])
@pytest.mark.parametrize(
    ("name", "given", "message"),
    [("quest", {"page": 64}, "a page of 64 entries does not fit"), ("infllm", {"local": 40}, "leaves no blocks")],
)
def test_a_budget_that_the_answer_cannot_keep_to_is_refused_before_the_prefill(model, way, name, given, message):
    ids = prompt()
    if way == "chat":
        model = build("llama")
    with kvsieve.attach(model, kvsieve.plan(name, budget="25%", floor=0, **given)) as sieve:
        cache = sieve.new_cache()
        if way == "later turn":
            sieve.prefill(ids[:, :60], cache=cache)
        before = cache.num_seen
        passes = []
        handle = sieve.decoder.register_forward_hook(lambda *_: passes.append(1))
        with pytest.raises(PlanError, match=message):
            if way == "chat":
                sieve.chat(chat_tokenizer(), max_new_tokens=3).ask("w1 w2 w3 " * 30)
            else:
                mask = None if way != "padded" else torch.ones_like(ids).index_fill(1, torch.arange(5), 0)
                sieve.generate(ids, mask, cache=cache, max_new_tokens=3, **GREEDY)
        handle.remove()
        assert not passes and cache.num_seen == before


@pytest.mark.parametrize("name", ["hsa", "rocketkv", "quest", "sparq"])
def test_traffic_and_storage_are_those_of_the_papers_formulas(model, name):
    plan, ids, new = kvsieve.plan(name, budget=32), prompt(size=200), 8
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids, max_new_tokens=new, **GREEDY)
    stats, store = result.stats, result.cache.sieve_layers[0].store
    dim, heads, layers = store.keys.shape[-1], store.heads, len(result.cache.layers)
    setting = plan.read.setting(ReadFacts(0, layers, 200, new, dim))
    last = store.size
    sizes = range(last - new + 2, last + 1)
    if name == "quest":
        estimate = [2 * dim * -(-size // setting.page) / (2 * dim) for size in sizes]
    else:
        estimate = [-(-size // setting.page) * setting.channels / (2 * dim) for size in sizes]
    item = store.keys.element_size()
    assert stats.traffic.entries == setting.count
    assert stats.traffic.estimate_entries == pytest.approx(sum(estimate) / len(estimate), abs=0.01)
    assert stats.traffic.bytes == setting.count * 2 * dim * item * heads * layers
    whole = sum(estimate) / len(estimate) * 2 * dim * item * heads * layers
    assert stats.traffic.estimate_bytes == pytest.approx(whole, abs=1)
    assert stats.traffic.entries + stats.traffic.estimate_entries <= 1.1 * 32
    kept = RocketEviction(budget=32).entries(200, new) + new - 1 if name == "rocketkv" else 200 + new - 1
    assert stats.storage.entries == kept == last
    # What a reader keeps: the bounds of pages, one half of them where a page is one entry.
    table = store.derived["kv_rows"].grouped.groups[0].state["pages"]
    halves = 1 if setting.page == 1 else 2
    used = table.bounds().numel()
    assert used == heads * halves * dim * -(-last // setting.page)
    assert stats.storage.metadata_bytes + stats.storage.bytes == stats.kv_bytes
    assert stats.storage.metadata_bytes >= storage_bytes(table.all_tensors()) >= used * item


@pytest.fixture(scope="module")
def single():
    """The model in the dtype that is read by compiled code."""
    return tiny_model(dtype=torch.float32)


COMPILED = ["quest", "hsa", "sparq", "rocketkv", "rocketkv-mt"]


@pytest.mark.parametrize("name", [*COMPILED, *(f"{name} shared" for name in COMPILED)])
def test_compiled_code_and_torch_read_alike(single, monkeypatch, name):
    """Padded rows, one after another: the same answers, and the same bytes counted."""
    ids, plan = prompt(2), planned(name)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    found = {}
    missing = "there is no C compiler: install gcc"
    for library in (reading.library, lambda name: Library(None, missing)):
        monkeypatch.setattr(reading, "library", library)
        given = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True, **GREEDY}
        with kvsieve.attach(single, plan) as sieve:
            result = sieve.generate(ids, mask, **given)
        found[result.stats.decoding.reading] = torch.stack(result.output.logits), result.stats.traffic
    assert f"torch: {missing}" in found
    # Where there is no compiler, both are torch.
    if "compiled" in found:
        compiled, plain = found["compiled"], found[f"torch: {missing}"]
        torch.testing.assert_close(compiled[0], plain[0], atol=1e-5, rtol=1e-5)
        assert compiled[1] == plain[1] and compiled[1].estimate_bytes > 0


def test_gradients_go_through_what_torch_reads(single):
    """A token that is given with gradients on is not read by compiled code, which has none."""
    ids, plan = prompt(), planned("hsa")
    with kvsieve.attach(single, plan) as sieve:
        cache = sieve.prefill(ids)
        single(ids[:, -1:], **{CACHE: cache}).logits.sum().backward()
        assert cache.turn.record.reads.not_compiled == "gradients are on"
    single.zero_grad()
