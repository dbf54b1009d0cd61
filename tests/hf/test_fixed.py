"""Decoding with fixed shapes: the engine, with a stand-in that runs a recorded pass again instead of a CUDA graph."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import kvsieve
from interpreted import interpreted
from kvsieve.errors import CacheStateError, KvsieveWarning, PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.decode import engine as fixed
from kvsieve.hf.forward.request import PassRequest
from kvsieve.methods import HSA, DuoAttention, DynamicKV, KNorm, PyramidKV
from kvsieve.planning.roles import Reader
from kvsieve.shared.prompt import next_logits
from small import NothingWaits, recorder_stand_in
from tiny import greedy, tiny_prompt
from tiny_models import build

PLANS = {
    "full": {},
    "snapkv": {"budget": 24, "window": 4},
    "fastkv": {"budget": 24, "window": 4, "tsp_layer": 1, "tsp_rate": 0.5},
    "adakv": {"budget": 24, "window": 4},
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
    "kascade": {"budget": 16},
    "omnikv": {"budget": 16, "share": "1", "wait": 0},
    "quest shared": {"budget": 16, "share": 2},
    "hsa shared": {"budget": 16, "share": 4, "skip_layers": 1},
    "rocketkv shared": {"budget": 16, "window": 4, "kernel": 5, "share": 3},
    "rocketkv-mt shared": {"budget": 16, "window": 4, "kernel": 5, "share": 3},
}
READ_FIRST = "a first pass of the reader is run eagerly"
GREEDY = greedy()


@pytest.fixture
def stand_in():
    with recorder_stand_in():
        yield


def planned(name):
    return kvsieve.plan(name.split()[0], **PLANS[name])


def duo():
    """Two of eight heads, in two of four layers, keep everything."""
    heads = ((1.0, 0.0), (0.0, 0.1), (0.0, 0.9), (0.1, 0.0))
    return kvsieve.Plan(evict=DuoAttention(budget=30, heads=heads, sinks=3, recent=6))


def prompt(rows=1, size=90, seed=3):
    return tiny_prompt(rows, size, seed=seed)


def padded(rows=3):
    ids = prompt(rows)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 11, 23)[:rows]):
        mask[row, :padding] = 0
    return ids, mask


def answer(model, plan, ids, mask=None, decode="graph", **options):
    """An answer and its logits [T, B, V]."""
    given = {"max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True, **GREEDY, **options}
    with kvsieve.attach(model, plan, decode=decode) as sieve:
        result = sieve.generate(ids, mask, **given)
    return result, torch.stack(result.output.logits)


def check_same(model, plan, ids, mask=None, fixed=11, captures=1, **options):
    """That both engines answer alike, read and store the same; `fixed` tokens of the second after `captures`."""
    wanted, logits = answer(model, plan, ids, mask, "eager", **options)
    ours, same = answer(model, plan, ids, mask, **options)
    assert torch.equal(ours.sequences, wanted.sequences)
    torch.testing.assert_close(same, logits)
    assert ours.stats.traffic == wanted.stats.traffic and ours.cache.entries() == wanted.cache.entries()
    for one, other in zip(ours.cache.layers, wanted.cache.layers, strict=True):
        torch.testing.assert_close(one.store.keys, other.store.keys)
        assert torch.equal(one.store.index, other.store.index) and one.store.lengths == other.store.lengths
    passes = ours.cache.turn.record.passes
    assert (passes.fixed, passes.captures) == (fixed, captures)
    assert ours.stats.decoding.engine == "graph" and ours.stats.decoding.reason is None
    alone = dataclasses.replace(wanted.stats.decoding, reading=None, compile_s=0.0)
    assert alone == kvsieve.hf.generate.stats.Decoding("eager", None, 0, 0.0)
    return ours


@pytest.mark.parametrize("name", [*PLANS, "full alone", "adakv alone", "hsa alone"])
def test_answers_are_those_of_the_eager_decoder(model, stand_in, name):
    name, alone, _ = name.partition(" alone")
    plan, rows = planned(name), 1 if alone else 3
    # A reader's first token is read eagerly.
    ours = check_same(model, plan, *padded(rows), fixed=11 - (plan.read is not None))
    assert ours.cache.turn.record.passes.reason == (READ_FIRST if plan.read is not None else None)


def test_heads_of_different_lengths(model, stand_in):
    check_same(model, duo(), *padded())
    # Lines that have come to be longer than the budget are read sparsely from then on.
    read = dataclasses.replace(duo(), read=HSA(budget=16), name="")
    check_same(model, read, *padded(2), fixed=19, captures=3, max_new_tokens=24)


@pytest.mark.parametrize("name", ["full", "adakv", "hsa", "sparq", "perturn"])
def test_with_kernels(stand_in, name):
    """What a GPU would run, under Triton's interpreter."""
    model, plan = build("llama", num_hidden_layers=2), planned(name)
    wanted, _ = answer(model, plan, *padded(2), "eager", max_new_tokens=4)
    with interpreted():
        ours, _ = answer(model, plan, *padded(2), max_new_tokens=4)
    assert torch.equal(ours.sequences, wanted.sequences) and ours.cache.turn.record.passes.fixed >= 2


@pytest.mark.parametrize("family", ["qwen3", "phi", "gpt_neox", "mixtral"])
def test_other_architectures(stand_in, family):
    check_same(build(family, dtype=torch.float64), planned("snapkv"), *padded(2))


@pytest.mark.parametrize("kind", [DynamicKV, PyramidKV])
def test_allocators_that_act_while_decoding(model, stand_in, kind):
    """Every fourth token they may drop something, and are asked eagerly; the others run with fixed shapes."""
    plan = kvsieve.Plan(evict=kind(base=KNorm(budget=24, every=4)))
    wanted, logits = answer(model, plan, *padded(2), "eager", max_new_tokens=20)
    ours, same = answer(model, plan, *padded(2), max_new_tokens=20)
    torch.testing.assert_close(same, logits)
    assert ours.cache.entries() == wanted.cache.entries()
    passes = ours.cache.turn.record.passes
    assert passes.eager == 4 and passes.fixed == 15 and passes.reason == f"{kind.__name__} acts on this token"


def test_sampling_goes_on_outside(model, stand_in):
    found = []
    for decode in ("eager", "graph"):
        torch.manual_seed(4)
        found.append(answer(model, planned("snapkv"), prompt(2), None, decode, do_sample=True, top_p=0.9)[0].sequences)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "name, options, fixed, captures",
    [
        ("streamingllm", {"budget": 40, "every": 5}, 19, 1),
        ("knorm", {"budget": 40, "every": 6}, 20, 1),
        # Partitions of 24: it would act on every token, and says which ones it has nothing to do on.
        ("lagkv", {"budget": 60, "lag": 24, "sinks": 2}, 21, 3),
    ],
)
def test_evictors_that_act_now_and_then(model, stand_in, name, options, fixed, captures):
    plan = kvsieve.plan(name, **options)
    check_same(model, plan, *padded(2), fixed=fixed, captures=captures, max_new_tokens=24)
    read = dataclasses.replace(plan, read=HSA(budget=16), name="")
    wanted, logits = answer(model, read, prompt(), None, "eager")
    ours, same = answer(model, read, prompt())
    torch.testing.assert_close(same, logits)
    assert ours.stats.traffic == wanted.stats.traffic


def test_lagkv_says_exactly_where_it_drops_nothing(model):
    """Under `is_noop`, select is not called; called anyway, it must not have anything to say."""
    plan = kvsieve.plan("lagkv", budget=60, lag=8, sinks=2, skip_layers=1)
    asked = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Asked(type(plan.evict)):
        def is_noop(self, *given):
            return False

        def select(self, ctx, counts):
            known = "counts" in ctx.state
            noop = super().is_noop(ctx.layer_idx, ctx.num_layers, ctx.stored, ctx.state)
            chosen = super().select(ctx, counts)
            if ctx.step.phase == "decode":
                asked.append(noop)
                assert noop == (chosen is None) and known == (ctx.layer_idx > 0)
            return chosen

    given = {each.name: getattr(plan.evict, each.name) for each in dataclasses.fields(plan.evict)}
    answer(model, kvsieve.Plan(evict=Asked(**given)), *padded(2), "eager")
    assert True in asked and False in asked


def follow(model, plan, decode, steps):
    """Logits of what `steps(sieve, feed)` feeds; feed(cache, ids, tokens) gives [B, T, V]."""
    found = []

    def feed(cache, ids, tokens):
        for column in tokens.T:
            ids = torch.cat([ids, column[:, None]], 1)
            found.append(next_logits(sieve, cache, ids))
        return ids

    with kvsieve.attach(model, plan, decode=decode) as sieve, torch.no_grad():
        steps(sieve, feed)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["full", "adakv", "hsa", "rocketkv-mt"])
def test_rollbacks_forks_turns_and_reordered_rows(model, stand_in, name):
    ids, more, plan = prompt(2), prompt(2, 6, seed=6), planned(name)

    def steps(sieve, feed):
        cache = sieve.prefill(ids)
        seen = feed(cache, ids, more[:, :4])
        taken, fork = cache.snapshot(), cache.fork()
        feed(cache, seen, more[:, :5])
        cache.rollback(taken)
        seen = feed(cache, seen, more)
        other = feed(fork, seen[:, :94], more.flip(1))
        cache.batch_select_indices(torch.tensor([1, 0]))
        whole = torch.cat([feed(cache, seen[[1, 0]], more), prompt(2, 20, seed=7)], 1)
        feed(sieve.prefill(whole, cache=cache), whole, more)
        # As beams change places, which end with the answer.
        fork.reorder_cache(torch.tensor([1, 0]))
        other = torch.cat([feed(fork, other[[1, 0]], more), prompt(2, 20, seed=7)], 1)
        with pytest.raises(CacheStateError, match="that of a beam search.*batch_select_indices"):
            sieve.prefill(other, cache=fork)

    torch.testing.assert_close(follow(model, plan, "graph", steps), follow(model, plan, "eager", steps))


def test_a_recording_serves_as_long_as_its_buffers_do(model, stand_in):
    ids = prompt()

    def counts(cache):
        passes = cache.turn.record.passes
        return passes.fixed, passes.captures

    def steps(sieve, feed):
        # Nobody said how many tokens would follow: room for 64 at a time.
        cache = sieve.prefill(ids)
        seen = feed(cache, ids, prompt(1, 64))
        assert counts(cache) == (64, 1)
        taken = cache.snapshot()
        seen = feed(cache, seen, prompt(1, 3))
        assert counts(cache) == (67, 2)
        # The snapshot still has the first buffers, which are full.
        cache.rollback(taken)
        feed(cache, seen[:, :-3], prompt(1, 3))
        assert counts(cache) == (67, 2)
        taken = cache.snapshot()
        feed(cache, seen, prompt(1, 4, seed=4))
        cache.rollback(taken)
        seen = feed(cache, seen, prompt(1, 2, seed=5))
        assert counts(cache) == (69, 2)
        # Another cache is recorded apart; both go on as they are.
        other = sieve.prefill(ids)
        feed(other, ids, prompt(1, 2))
        feed(cache, seen, prompt(1, 2, seed=5))
        assert counts(cache) == (71, 2) and counts(other) == (2, 1)

    follow(model, planned("full"), "graph", steps)


def test_an_answer_is_recorded_once_whatever_its_length(model, stand_in):
    check_same(model, planned("snapkv"), prompt(size=40), fixed=149, max_new_tokens=150)


@dataclasses.dataclass(frozen=True)
class Own(Reader):
    """A reader that knows nothing of lengths on the device."""

    inner: HSA = HSA(budget=16)

    def setting(self, facts):
        return self.inner.setting(facts)

    def reads_all(self, setting, size):
        return False

    def choose(self, asked, kv_rows, state, setting):
        return self.inner.choose(asked, kv_rows, state, setting)


REFUSED = {
    "beams": ("full", {"num_beams": 2}, "beams"),
    "hidden states": ("full", {"output_hidden_states": True}, "output_hidden_states is asked for"),
    "an evictor that observes": (("h2o", {"budget": 40, "every": 4}), {}, "H2O observes every token"),
    "recent queries": (("snapkv", {"budget": 40, "every": 4}), {}, "keeps the queries of the last tokens"),
    "acting on every token": (("tova", {"budget": 40, "every": 1}), {}, "TOVA acts on this token"),
    "a reader of one's own": (kvsieve.Plan(read=Own()), {}, "Own does not choose with fixed shapes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_so_is_run_eagerly_and_says_why(model, stand_in, case):
    plan, options, reason = REFUSED[case]
    plan = planned(plan) if isinstance(plan, str) else kvsieve.plan(plan[0], **plan[1]) if type(plan) is tuple else plan
    wanted, _ = answer(model, plan, prompt(2), None, "eager", max_new_tokens=6, **options)
    ours, _ = answer(model, plan, prompt(2), max_new_tokens=6, **options)
    assert torch.equal(ours.sequences, wanted.sequences)
    assert ours.stats.decoding.engine == "eager" and reason in ours.stats.decoding.reason


def test_single_passes_that_are_refused(model, stand_in):
    ids, token = prompt(2), prompt(2, 1, seed=9)
    whole = torch.cat([ids, token], 1)
    mask = torch.ones_like(whole)
    mask[1, :9] = 0
    for kind in ("padding", "positions", "gradients"):
        hidden = mask.clone()
        hidden[0, -1] = kind != "padding"
        with kvsieve.attach(model, planned("full"), decode="graph") as sieve:
            cache = sieve.prefill(ids, mask[:, :-1])
            with torch.set_grad_enabled(kind == "gradients"):
                model(input_ids=token, attention_mask=hidden, **{CACHE: cache})
        assert {"padding": "is padding", "positions": "no position_ids", "gradients": "gradients"}[kind] in str(
            cache.turn.record.passes.reason
        )


def test_sliding_layers_and_several_tokens_at_once(stand_in):
    model = build("gemma3_text", dtype=torch.float64)
    ours, _ = answer(model, planned("full"), prompt(), max_new_tokens=4)
    assert "sliding windows" in ours.stats.decoding.reason
    model = build("qwen2", dtype=torch.float64)
    with kvsieve.attach(model, planned("full"), decode="graph") as sieve, torch.no_grad():
        cache = sieve.prefill(prompt())
        sieve.feed(cache, prompt(size=3), None, PassRequest(phase="decode"))
    assert cache.turn.record.passes.reason == "a first pass of 3 tokens is run eagerly"


def test_a_decoder_that_counts_tokens_by_itself(stand_in):
    """Its cache's length would be recorded, and be the same for every token."""
    model = build("opt", dtype=torch.float64)
    ours, _ = answer(model, planned("full"), prompt(), max_new_tokens=4)
    wanted, _ = answer(model, planned("full"), prompt(), None, "eager", max_new_tokens=4)
    assert torch.equal(ours.sequences, wanted.sequences)
    assert "asks the cache how many tokens there were" in ours.stats.decoding.reason


def test_a_graph_needs_cuda_and_bad_names_are_refused(model):
    with pytest.warns(KvsieveWarning, match="decode='graph' computes tokens eagerly here: a CUDA graph needs"):
        ours, _ = answer(model, planned("full"), prompt(), max_new_tokens=3)
    assert ours.stats.decoding.engine == "eager"
    assert ours.stats.decoding.reason == "a CUDA graph needs the model on a CUDA device, it is on cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error", KvsieveWarning)
        ours, _ = answer(model, planned("full"), prompt(), None, "auto", max_new_tokens=3)
    assert ours.stats.decoding.engine == "eager" and ours.stats.decoding.reason is None
    with pytest.raises(PlanError, match="decode must be one of auto, eager, .*, got 'fast'"):
        answer(model, planned("full"), prompt(), None, "fast")


@pytest.mark.parametrize("name", ["full", "sparq"])
def test_a_decoder_that_cannot_be_recorded_answers_eagerly(model, monkeypatch, name):
    """After a half-run warm-up too: what it stored and summed up does not count."""
    runs = []

    def record(run):
        runs.append(run())
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setitem(fixed.RECORDERS, "graph", lambda device: record)
    wanted, logits = answer(model, planned(name), *padded(2), "eager")
    ours, same = answer(model, planned(name), *padded(2))
    torch.testing.assert_close(same, logits)
    told = "the decoder cannot be recorded (graph): operation not permitted when stream is capturing"
    assert ours.stats.decoding.reason == told and len(runs) == 1
    # What the reader remembered was thrown away, and its making anew is told.
    again, once = ours.stats.traffic, wanted.stats.traffic
    assert again.upkeep_bytes > once.upkeep_bytes if name == "sparq" else again == once
    assert dataclasses.replace(again, upkeep_entries=0, upkeep_bytes=0) == dataclasses.replace(
        once, upkeep_entries=0, upkeep_bytes=0
    )


def test_nothing_is_left_behind(model, stand_in):
    before = dict(vars(model.get_decoder()))
    with kvsieve.attach(model, planned("full"), decode="graph") as sieve:
        result = sieve.generate(prompt(), max_new_tokens=3, **GREEDY)
        assert "forward" in vars(model.get_decoder()) and len(sieve.engine._known) == 1
        # What was recorded goes with its cache.
        del result
        assert not sieve.engine._known
        result = sieve.generate(prompt(), max_new_tokens=3, **GREEDY)
    assert vars(model.get_decoder()) == before and not sieve.engine._known and result.cache.num_seen == 92
    with pytest.raises(ZeroDivisionError), kvsieve.attach(model, planned("full"), decode="graph"):
        1 / 0  # noqa: B018
    assert vars(model.get_decoder()) == before


@pytest.mark.parametrize("name", ["full", "adakv", "hsa"])
def test_a_pass_waits_for_nothing_and_serves_later_answers(name):
    model, plan = build("llama", dtype=torch.float64, num_hidden_layers=2), planned(name)
    with recorder_stand_in(watched=NothingWaits):
        for seed in (3, 4):
            wanted, logits = answer(model, plan, prompt(2, seed=seed), None, "eager", max_new_tokens=6)
            ours, same = answer(model, plan, prompt(2, seed=seed), None, "graph", max_new_tokens=6)
            torch.testing.assert_close(same, logits)
            assert ours.stats.decoding.engine == "graph" and ours.stats.traffic == wanted.stats.traffic
