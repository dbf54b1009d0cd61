"""KeyDiff, SAGE-KV, ChunkKV, CriticalKV and Expected Attention: by hand, against slow references, and on a model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.errors import CacheStateError, PlanError, UnsupportedModelError
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.methods import H2O, TSP, ChunkKV, CriticalKV, ExpectedAttention, KeyDiff, KNorm, SageKV, SnapKV
from kvsieve.shared.prompt import read_shared
from kvsieve.types import When
from layers import context, kept
from rotating import Rotating
from scored import Given, best, given
from tiny import tiny_prompt

PLANS = {
    "keydiff": Plan(evict=KeyDiff(budget="40%")),
    "sagekv": Plan(evict=SageKV(budget="40%")),
    "chunkkv": Plan(evict=ChunkKV(base=SnapKV(budget="40%", window=4, kernel=3), chunk_length=5)),
    "criticalkv": Plan(evict=CriticalKV(base=SnapKV(budget="40%", window=4, kernel=3))),
    "expected": Plan(evict=ExpectedAttention(budget="40%", n_future=70)),
    "critical-expected": Plan(evict=CriticalKV(base=ExpectedAttention(budget="40%", n_future=9, use_vnorm=False))),
}
GROUPS = pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
PADDING = [0, 17]
F64 = torch.float64


def random_rows(groups, length=63, heads=2, size=8):
    """Query, keys and values of two rows, the second of them padded."""
    generator = torch.Generator().manual_seed(groups)
    shapes = (2, heads * groups, length, size), (2, heads, length, size), (2, heads, length, size)
    return [torch.randn(shape, dtype=F64, generator=generator) for shape in shapes]


def rows_alone(query, keys, values):
    for row, pad in enumerate(PADDING):
        yield row, pad, query[row, :, pad:], keys[row, :, pad:], values[row, :, pad:]


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, 50, seed=4)


def columns(cache, row=0):
    """What each layer and head has stored of a row."""
    out = []
    for layer in cache.sieve_layers.values():
        index = layer.store.index[row]
        real = index >= 0 if layer.store.valid is None else layer.store.valid[row] & (index >= 0)
        out.append([head[mask].tolist() for head, mask in zip(index, real.expand_as(index), strict=True)])
    return out


# KeyDiff


def test_keydiff_by_hand():
    # Normalised keys: three along x, one along y, one between; the mean points to 25 degrees: between is the nearest.
    keys = torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 0.1], [1.0, 0.0], [3.0, 3.0]])[None, None]
    ctx = context(torch.zeros_like(keys), keys)
    assert kept(KeyDiff(budget=2), ctx) == [[0, 2]]
    assert kept(KeyDiff(budget=4), ctx) == [[0, 1, 2, 3]]


def slow_keydiff(keys):
    """[N] scores of one head, plain loops."""
    unit = [[x / math.sqrt(sum(y * y for y in key)) for x in key] for key in keys.tolist()]
    anchor = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    length = math.sqrt(sum(x * x for x in anchor))
    return [-sum(x * y for x, y in zip(key, anchor, strict=True)) / length for key in unit]


def test_keydiff_equals_the_slow_reference_in_padded_batches():
    query, keys, values = random_rows(1)
    ctx = context(query, keys, values=values, padding=PADDING)
    for row, pad, _, own, _ in rows_alone(query, keys, values):
        for head, ours in enumerate(kept(KeyDiff(budget="30%"), ctx, row)):
            assert ours == [pad + j for j in best(slow_keydiff(own[head]), int(0.3 * (63 - pad)))]


@pytest.mark.parametrize("budget", [12, "40%"])
def test_keydiff_in_chunks_judges_what_is_left_and_the_chunk(model, ids, budget):
    """First layer only: its keys do not depend on what was evicted."""
    plan = kvsieve.plan("keydiff", budget=budget, chunks=True)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        keys = sieve.prefill(ids[:1]).sieve_layers[0].store.keys[0]
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids[:1], chunk=16)
    for head in range(2):
        stored = []
        # Chunks are counted from the prompt's end, so that a padded row has the same ones.
        for start, end in itertools.pairwise((0, 2, 18, 34, 50)):
            stored += range(start, end)
            count = plan.evict.budget.entries(end)
            # Two keys are equally like their mean.
            scores = slow_keydiff(keys[head, stored]) if len(stored) > 2 else [0.0] * len(stored)
            stored = [stored[j] for j in best(scores, count)]
        assert columns(cache)[0][head] == stored
    assert not plan.acts_once and KeyDiff(budget=3, every=2).when == When(steps=2)


# SAGE-KV


def test_sagekv_by_hand():
    # The last query likes slots 3, 7, 5, in this order; two sinks, and half of six is the window.
    keys = torch.tensor([0.0, 0, 0, 9, 0, 4, 0, 6, 0, 0, 0, 0])[None, None, :, None]
    ctx = context(torch.ones_like(keys), keys, scale=1.0)
    assert kept(SageKV(budget=6, sinks=2), ctx) == [[0, 1, 3, 9, 10, 11]]
    assert kept(SageKV(budget=6, sinks=2, recent=0.2), ctx) == [[0, 1, 3, 5, 7, 11]]
    assert kept(SageKV(budget=6, sinks=2, recent=1), ctx) == [[0, 1, 8, 9, 10, 11]]
    assert kept(SageKV(budget=3, sinks=0, recent=0), ctx) == [[3, 7, 11]]


@GROUPS
def test_sagekv_equals_the_slow_reference_in_padded_batches(groups):
    query, keys, values = random_rows(groups)
    ctx = context(query, keys, values=values, padding=PADDING)
    for row, pad, own_query, own_keys, _ in rows_alone(query, keys, values):
        length = 63 - pad
        count = int(0.4 * length)
        recent = int(count * 0.3)
        for head, ours in enumerate(kept(SageKV(budget="40%", sinks=3, recent=0.3), ctx, row)):
            heads = range(head * groups, (head + 1) * groups)
            masses = [(own_keys[head] @ own_query[h, -1] * ctx.scale).softmax(0) for h in heads]
            score = sum(masses).tolist()
            middle = [3 + j for j in best(score[3 : length - recent], count - recent - 3)]
            assert ours == [pad + j for j in [0, 1, 2, *middle, *range(length - recent, length)]]


@pytest.mark.parametrize("budget", ["40%", 200], ids=["evicts", "covers-the-prompt"])
def test_sagekv_rolls_its_window_while_decoding(model, ids, budget):
    once = kvsieve.plan("sagekv", budget="40%")
    plan = kvsieve.plan("sagekv", budget="40%" if budget == "40%" else 52, every=3)
    with kvsieve.attach(model, once if budget == "40%" else kvsieve.plan("full")) as sieve:
        before = columns(sieve.prefill(ids[:1]))
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.generate(ids[:1], max_new_tokens=31, min_new_tokens=31, do_sample=False).cache
    count = 20 if budget == "40%" else 52
    # Half of the budget is the window, sinks and chosen entries before it stay; 30 tokens were stored since.
    for layer, heads in enumerate(columns(cache)):
        for head, ours in enumerate(heads):
            stay = before[layer][head][: len(before[layer][head]) - (10 if budget == "40%" else 26)]
            assert ours == [*stay, *range(80 - (count - len(stay)), 80)]


def test_sagekv_rolls_padded_rows_and_beams_alike(model, ids):
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "num_beams": 2}
    with kvsieve.attach(model, kvsieve.plan("sagekv", budget="40%", every=2)) as sieve:
        together = sieve.generate(ids, mask, **options)
        alone = sieve.generate(ids[1:, 9:], **options)
    assert torch.equal(together.sequences[1, 50:], alone.sequences[0, 41:])
    wanted = [[[column + 9 for column in head] for head in layer] for layer in columns(alone.cache)]
    assert columns(together.cache, row=2) == wanted


# ChunkKV


def test_chunkkv_by_hand():
    # Chunks of 3: means 2, 3, 1, and 2.5 of the short last one.
    ctx = given([[[3, 0, 3, 3, 3, 3, 0, 0, 3, 2, 3]]])
    assert kept(ChunkKV(base=Given(budget=3), chunk_length=3), ctx) == [[3, 4, 5]]
    assert kept(ChunkKV(base=Given(budget=5), chunk_length=3), ctx) == [[3, 4, 5, 9, 10]]
    # The next best chunk is the first, of which two tokens fit.
    assert kept(ChunkKV(base=Given(budget=7), chunk_length=3), ctx) == [[0, 1, 3, 4, 5, 9, 10]]
    assert kept(ChunkKV(base=Given(budget=1), chunk_length=3), ctx) == [[3]]


def test_chunkkv_sums_heads_and_keeps_what_is_protected():
    inf = math.inf
    ctx = given([[[0, 0, 5, 5, 0, 0, 1, 9], [1, 1, 0, 0, 3, 4, 1, inf]]])
    assert kept(ChunkKV(base=Given(budget=4), chunk_length=2), ctx) == [[2, 3, 4, 7]] * 2
    # Without its protected neighbour slot 6 competes alone, with 2 against the first chunk's 1.
    assert kept(ChunkKV(base=Given(budget=6), chunk_length=2), ctx) == [[2, 3, 4, 5, 6, 7]] * 2


@pytest.mark.parametrize("chunk", [1, 4, 10, 100])
def test_chunkkv_equals_the_slow_reference_in_padded_batches(chunk):
    scores = torch.randn(2, 3, 63, dtype=F64, generator=torch.Generator().manual_seed(chunk))
    ctx = given(scores, padding=PADDING)
    for row, pad in enumerate(PADDING):
        total = scores[row, :, pad:].sum(0).tolist()
        length, count = len(total), int(0.37 * (63 - pad))
        chunks = [range(start, min(start + chunk, length)) for start in range(0, length, chunk)]
        chunks.sort(key=lambda part: (-sum(total[j] for j in part) / len(part), part[0]))
        wanted = sorted([j for part in chunks for j in part][:count])
        assert kept(ChunkKV(base=Given(budget="37%"), chunk_length=chunk), ctx, row) == [[pad + j for j in wanted]] * 3


def test_chunks_of_one_token_are_the_base_with_heads_shared():
    query, keys, values = random_rows(1, heads=1)
    ctx = context(query, keys, values=values, padding=PADDING)
    base = SnapKV(budget="30%", window=4, kernel=3)
    for row in range(2):
        assert kept(ChunkKV(base=base, chunk_length=1), ctx, row) == kept(base, ctx, row)


# CriticalKV


def test_criticalkv_by_hand():
    values = torch.tensor([1.0, 1.0, 9.0, 1.0, 4.0, 1.0], dtype=F64)[None, None, :, None]
    ctx = context(values, values, values=values, shared={"scores": torch.tensor([[[6.0, 5, 1, 4, 2, 0]]], dtype=F64)})
    # W_o = (1, -1): w = 2 |v|, so scores times w are 12, 10, 18, 8, 16, 0.
    ctx = dataclasses.replace(ctx, model=Rotating(weight=torch.tensor([[[1.0, -1.0]]])))
    assert kept(CriticalKV(base=Given(budget=2)), ctx) == [[0, 2]]
    assert kept(CriticalKV(base=Given(budget=3)), ctx) == [[0, 2, 4]]
    assert kept(CriticalKV(base=Given(budget=4)), ctx) == [[0, 1, 2, 4]]
    # Protected entries come first, whatever they put out.
    ctx.shared["scores"][..., 5] = math.inf
    assert kept(CriticalKV(base=Given(budget=2)), ctx) == [[2, 5]]


def test_criticalkv_raises_negative_scores_first():
    values = torch.tensor([1.0, 1.0, 9.0, 1.0], dtype=F64)[None, None, :, None]
    scores = torch.tensor([[[-1.0, -4, -2, -3]]], dtype=F64)
    ctx = context(values, values, values=values, shared={"scores": scores})
    ctx = dataclasses.replace(ctx, model=Rotating(weight=torch.ones(1, 1, 1)))
    # Raised by 4: 3, 0, 2, 1, of which slot 2 with its large value is the best but one.
    assert kept(CriticalKV(base=Given(budget=2)), ctx) == [[0, 2]]


@GROUPS
def test_criticalkv_equals_the_slow_reference_in_padded_batches(groups, monkeypatch):
    monkeypatch.setattr("kvsieve.methods.criticalkv._BLOCK_ELEMENTS", 200)
    query, keys, values = random_rows(groups)
    weight = torch.randn(2 * groups, 8, 12, dtype=F64, generator=torch.Generator().manual_seed(9))
    scores = torch.rand(2, 2, 63, dtype=F64, generator=torch.Generator().manual_seed(8))
    ctx = context(query, keys, values=values, padding=PADDING, shared={"scores": scores})
    ctx = dataclasses.replace(ctx, model=Rotating(weight=weight))
    for row, pad, _, _, own in rows_alone(query, keys, values):
        count = int(0.3 * (63 - pad))
        for head, ours in enumerate(kept(CriticalKV(base=Given(budget="30%")), ctx, row)):
            group = range(head * groups, (head + 1) * groups)
            mine = scores[row, head, pad:].tolist()
            out = [sum((value @ weight[h]).abs().sum().item() for h in group) / groups for value in own[head]]
            first = best(mine, count // 2)
            rest = [-math.inf if j in first else (s + 1e-4) * w for j, (s, w) in enumerate(zip(mine, out, strict=True))]
            assert ours == [pad + j for j in sorted([*first, *best(rest, count - count // 2)])]


def test_criticalkv_keeps_a_set_per_query_head_where_its_base_does():
    query, keys, values = random_rows(2)
    base = SnapKV(budget="30%", window=4, kernel=3, per_query_head=True)
    ctx = context(query, keys, values=values)
    ctx = dataclasses.replace(ctx, model=Rotating(weight=torch.ones(4, 8, 3)))
    assert len(kept(CriticalKV(base=base), ctx)) == 4
    with pytest.raises(UnsupportedModelError, match=r"heads of \(4, 7\), its attention puts out \(4, 8\)"):
        kept(CriticalKV(base=base), dataclasses.replace(ctx, model=Rotating(weight=torch.ones(4, 7, 3))))


# Expected Attention


def slow_expected(query, keys, values, facts, scale, sinks, future, covariance, vnorm):
    """[N] scores of the entries after the sinks for one KV head; query [G, N, D], all post-rotation."""
    length, size = keys.shape
    own = range(sinks, length)
    probabilities = []
    for head in query:
        back = [facts.rotate(0, head[None, None, i : i + 1], torch.tensor([[i]]), inverse=True).flatten() for i in own]
        mean = sum(back) / len(back)
        sigma = sum(torch.outer(q - mean, q - mean) for q in back) / len(back)
        turn = torch.zeros(size, size, dtype=F64)
        for place in range(length, length + future):
            for j, unit in enumerate(torch.eye(size, dtype=F64)):
                turn[:, j] += facts.rotate(0, unit[None, None, None], torch.tensor([[place]])).flatten() / future
        mean, sigma = turn @ mean, turn @ sigma @ turn.T
        z = [scale * (mean @ keys[j]) + covariance * scale**2 * (keys[j] @ sigma @ keys[j]) / 2 for j in own]
        probabilities.append(torch.stack(z).softmax(0))
    mean = sum(probabilities) / len(probabilities)
    return [p.item() * (values[j].norm().item() if vnorm else 1) for p, j in zip(mean, own, strict=True)]


def looked(evictor, ctx):
    evictor.observe(ctx)
    return ctx


@GROUPS
@pytest.mark.parametrize(("covariance", "vnorm"), [(True, True), (False, False)], ids=["all", "mean-only"])
def test_expected_attention_equals_the_slow_reference_in_padded_batches(groups, covariance, vnorm, monkeypatch):
    for name, value in {"_QUERIES": 20, "_FUTURE": 5, "_BLOCK_ELEMENTS": 1000}.items():
        monkeypatch.setattr(f"kvsieve.methods.expected_attention.{name}", value)
    query, keys, values = random_rows(groups, length=40)
    query = query + torch.randn(1, 2 * groups, 1, 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    padding, facts = [0, 13], Rotating()
    evictor = ExpectedAttention(budget="50%", sinks=3, n_future=13, use_covariance=covariance, use_vnorm=vnorm)
    ctx = dataclasses.replace(context(query, keys, values=values, padding=padding), model=facts)
    # The model has rotated by true positions, which do not count the padding.
    looked(evictor, ctx)
    for row, pad in enumerate(padding):
        count = int(0.5 * (40 - pad))
        for head, ours in enumerate(kept(evictor, ctx, row)):
            group = query[row, head * groups : (head + 1) * groups, pad:]
            args = (keys[row, head, pad:], values[row, head, pad:], facts, ctx.scale, 3, 13, covariance, vnorm)
            wanted = [0, 1, 2, *(3 + j for j in best(slow_expected(group, *args), count - 3))]
            assert ours == [pad + j for j in wanted]


def test_expected_attention_of_constant_queries_is_their_attention():
    """Without covariance and for one future position the score is the softmax of that query's own logits."""
    facts, length = Rotating(), 21
    _, keys, values = random_rows(1, length=length)
    constant = torch.randn(1, 2, 1, 8, dtype=F64, generator=torch.Generator().manual_seed(3))
    query = facts.rotate(0, constant.expand(1, -1, length, -1), torch.arange(length)[None])
    evictor = ExpectedAttention(budget=9, n_future=1, use_covariance=False, use_vnorm=False)
    ctx = dataclasses.replace(context(query, keys[:1], values=values[:1]), model=facts)
    scores = evictor.scores(looked(evictor, ctx))
    following = facts.rotate(0, constant, torch.tensor([[length]]))
    exact = (keys[:1, :, 4:] @ following.transpose(-1, -2) * ctx.scale).squeeze(-1).softmax(-1)
    torch.testing.assert_close(scores[..., 4:], exact)
    assert scores[..., :4].isposinf().all()


def test_expected_attention_merges_passes_exactly():
    query, keys, values = random_rows(3, length=40)
    evictor, facts = ExpectedAttention(budget=9), Rotating()
    whole = dataclasses.replace(context(query, keys, values=values, padding=[0, 7]), model=facts)
    looked(evictor, whole)
    # Chunks that end inside the padding, inside the sinks and after them.
    state: dict = {}
    for start, end in ((0, 5), (5, 9), (9, 10), (10, 40)):
        lengths = (end, max(0, end - 7))
        step = dataclasses.replace(whole.step, start=start, num_new=end - start, lengths=lengths)
        part = {name: getattr(whole, name)[:, :, :end] for name in ("keys", "values", "index", "valid")}
        evictor.observe(dataclasses.replace(whole, query=query[:, :, start:end], step=step, state=state, **part))
    assert state.keys() == whole.state.keys()
    for name, value in whole.state.items():
        torch.testing.assert_close(state[name], value)
    assert state["queries"].tolist() == [36, 29]


def test_expected_attention_goes_with_propagation_in_chunks(model, ids):
    plan = Plan(propagate=TSP(rate=0.5, layer=1, window=4), evict=ExpectedAttention(budget="30%", n_future=20))
    with kvsieve.attach(model, plan) as sieve:
        whole, parts = (sieve.prefill(ids[:1], chunk=chunk) for chunk in (None, 11))
    assert columns(whole) == columns(parts) and whole.entries() == [15] * 4


def test_expected_attention_counts_generated_queries_and_stays_bounded(model, ids):
    plan = Plan(evict=ExpectedAttention(budget="40%", n_future=20, every=4))
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.generate(ids[:1], max_new_tokens=21, min_new_tokens=21, do_sample=False).cache
    assert cache.entries() == [20] * 4
    assert {layer.state["queries"].item() for layer in cache.sieve_layers.values()} == {50 - 4 + 20}


# All of them


@pytest.mark.parametrize("name", PLANS)
def test_padded_rows_chunks_budgets_and_round_trips(model, ids, name):
    plan = PLANS[name]
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    with kvsieve.attach(model, plan) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
        parts = sieve.prefill(ids, mask, chunk=7)
        again = sieve.generate(ids, mask, max_new_tokens=4, do_sample=False)
    assert [[len(head) for head in layer] for layer in columns(together)] == [[20, 20]] * 4
    assert [[[column + 9 for column in head] for head in layer] for layer in columns(alone)] == columns(together, row=1)
    assert [len(columns(together, row=1)[0][0])] == [int(0.4 * 41)]
    assert [columns(parts, row) for row in (0, 1)] == [columns(together, row) for row in (0, 1)]
    assert again.stats.applied and plan.acts_once
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("name", PLANS)
def test_what_the_caller_protects_stays_within_the_budget(name):
    query, keys, values = random_rows(2)
    ctx = context(query, keys, values=values, padding=PADDING)
    wanted = [19, 20, 21, 40, 41, 42, 43, 44]
    protected = torch.zeros(2, 2, 63, dtype=torch.bool)
    protected[:, :, wanted] = True
    ctx = dataclasses.replace(ctx, protected=protected, model=Rotating(weight=torch.ones(4, 8, 3, dtype=F64)))
    evictor = PLANS[name].evict
    if evictor.when.observes:
        evictor.observe(ctx)
    for row, pad in enumerate(PADDING):
        for ours in kept(evictor, ctx, row):
            assert set(wanted) <= set(ours) and len(ours) == int(0.4 * (63 - pad))
            assert name != "sagekv" or {pad, pad + 3, 62} <= set(ours)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("chunk", [None, 17])
def test_a_shared_reading_is_reduced_as_the_plan_itself_would(model, ids, name, chunk):
    plan = PLANS[name]
    others = [PLANS["expected"].evict, ExpectedAttention(budget="10%"), None]
    shared = read_shared(
        model, None, ids[:1], window=plan.window + 3, evictors=[plan.evict, *others], options=ReadOptions(chunk)
    )
    with kvsieve.attach(model, plan) as sieve:
        own = sieve.prefill(ids[:1], chunk=chunk)
    for _ in range(2):
        cache = shared.reduced(plan.evict)
        assert columns(cache) == columns(own)
        assert cache.turn.record == own.turn.record


def test_an_evictor_that_was_not_there_at_the_reading_is_refused(model, ids):
    shared = read_shared(model, None, ids[:1], window=8, evictors=[PLANS["keydiff"].evict])
    for evictor in (PLANS["expected"].evict, PLANS["critical-expected"].evict):
        with pytest.raises(CacheStateError, match="observes every pass of a prompt and was not there"):
            shared.reduced(evictor)


def test_evictors_that_observe_must_have_observe():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Blind(KNorm):
        @property
        def when(self):
            return When(observes=True)

    with pytest.raises(PlanError, match=r"Blind has When\(observes=True\) and no method observe"):
        Plan(evict=Blind(budget=3))


def test_wrapped_methods_by_name():
    plan = kvsieve.plan("chunkkv", base="knorm", budget="12%", chunk_length=4, skip_layers=1, every=3)
    assert plan.evict == ChunkKV(base=KNorm(budget="12%", skip_layers=1, every=3), chunk_length=4)
    assert kvsieve.plan("criticalkv").evict == CriticalKV(base=SnapKV(budget="20%"))
    assert kvsieve.plan("criticalkv", base="expected_attention").evict.traits.needs == (
        "output_weight",
        "rotary",
        "uncapped",
    )
    assert Plan.from_dict(plan.to_dict()).evict == plan.evict and plan.name == "chunkkv"
    for base in ("full", "fastkv", "lagkv", "chunkkv", "h2o", "sagekv"):
        with pytest.raises(PlanError, match="base must|no parameter 'budget'"):
            kvsieve.plan("chunkkv", base=base)
    for bad in (H2O(budget=9), SageKV(budget=9), PLANS["chunkkv"].evict, "snapkv", SnapKV):
        with pytest.raises(PlanError, match="base must be an evictor that ranks entries by scores alone"):
            CriticalKV(base=bad)


def test_nan_scores_are_refused():
    scores = torch.zeros(1, 1, 9)
    scores[..., 4] = math.nan
    ctx = dataclasses.replace(given(scores), model=Rotating(weight=torch.ones(1, 4, 2)))
    for evictor in (ChunkKV(base=Given(budget=4), chunk_length=2), CriticalKV(base=Given(budget=4))):
        with pytest.raises(ValueError, match="NaN"):
            kept(evictor, ctx)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KeyDiff(budget=3, chunks=2), "chunks"),
        (lambda: SageKV(budget=9, recent=1.5), "recent"),
        (lambda: SageKV(budget=5), "at least 6 are needed"),
        (lambda: ChunkKV(base=KNorm(budget=3), chunk_length=0), "chunk_length"),
        (lambda: ExpectedAttention(budget=4), "4 sinks and one more"),
        (lambda: ExpectedAttention(budget=9, n_future=0), "n_future"),
        (lambda: ExpectedAttention(budget=9, use_vnorm=None), "use_vnorm"),
    ],
    ids=["chunks", "recent", "sage-budget", "chunk", "expected-budget", "n_future", "use_vnorm"],
)
def test_bad_parameters_are_named(make, match):
    with pytest.raises(PlanError, match=match):
        make()


def test_facts_are_asked_for_where_there_is_a_model():
    query, keys, values = random_rows(1)
    with pytest.raises(UnsupportedModelError, match=r"kvsieve\.attach provides"):
        looked(ExpectedAttention(budget=9), context(query, keys, values=values))
