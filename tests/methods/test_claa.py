"""CLAA and staged propagation: what goes on by hand and by a slow reference, and when they are FastKV's."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.methods import TSP, CrossLayerTSP, SnapKV, StagedTSP
from kvsieve.planning.budget import Budget
from layers import context
from tiny import tiny_model, tiny_prompt
from tiny_models import build

LAYERS, N, PADDING = 6, 60, 11


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, N, seed=3)


def run(model, plan, *inputs, **options):
    with kvsieve.attach(model, plan) as sieve:
        return sieve.generate(*inputs, **{"max_new_tokens": 4, "do_sample": False, **options})


def columns(result, layer, row=0):
    store = result.cache.sieve_layers[layer].store
    found = store.index[row, 0][store.valid[row, 0] if store.valid is not None else slice(None)].tolist()
    return [column for column in found if column < N]


def rows(*tops):
    """Contexts of one head in successive layers, whose last query looks at these tokens of eight, best first."""
    out, shared = [], {}
    for index, top in enumerate(tops):
        keys = torch.zeros(1, 1, 8, 1, dtype=torch.float64)
        for place, token in enumerate(top):
            keys[0, 0, token] = 6.0 - 2 * place
        query = torch.ones(1, 1, 8, 1, dtype=torch.float64)
        out.append(context(query, keys, scale=1.0, layer_idx=index, num_layers=9, shared=shared))
    return out


def test_by_hand():
    part = CrossLayerTSP(rate=3, layer=2, joined=2, window=1, kernel=1)
    first, second, third = rows((0, 1), (5, 2), (3, 2))
    assert part.select(first) is None and part.select(second) is None
    # Best of the last two layers are 5 and 3; layer 0 is not asked, and the window goes on.
    assert part.select(third).indices.tolist() == [[3, 5, 7]]
    alone = CrossLayerTSP(rate=3, layer=2, joined=1, window=1, kernel=1)
    assert [alone.select(each) for each in rows((0, 1), (5, 2))] == [None, None]
    (last,) = rows((0,), (0,), (3, 2))[2:]
    assert alone.select(last).indices.tolist() == [[2, 3, 7]]


@pytest.mark.parametrize("padding", [[0, 0], [0, PADDING]], ids=["", "padded"])
@pytest.mark.parametrize("groups", [1, 3])
def test_equals_the_slow_reference(groups, padding):
    torch.manual_seed(groups)
    heads, joined, window, kernel, shared = 2, 3, 4, 3, {}
    part = CrossLayerTSP(rate="40%", layer=3, joined=joined, window=window, kernel=kernel, pooling="avg")
    layers = []
    for index in range(4):
        query = torch.randn(2, heads * groups, N, 8, dtype=torch.float64)
        keys = torch.randn(2, heads, N, 8, dtype=torch.float64)
        layers.append((query, keys))
        selection = part.select(context(query, keys, padding=padding, layer_idx=index, num_layers=9, shared=shared))
        assert (selection is None) == (index < 3)
    for row, pad in enumerate(padding):
        best = [0.0] * (N - window)
        for query, keys in layers[-joined:]:
            mean = torch.zeros(N - window, dtype=torch.float64)
            for head in range(heads * groups):
                for at in range(N - window, N):
                    logits = keys[row, head // groups, pad : at + 1] @ query[row, head, at] * 8**-0.5
                    mean[pad:] += logits.softmax(-1)[: N - window - pad] / (heads * groups)
            for j in range(pad, N - window):
                near = [float(mean[i]) for i in range(j - 1, j + 2) if pad <= i < N - window]
                best[j] = max(best[j], sum(near) / kernel)
        count = int(0.4 * (N - pad))
        chosen = sorted(range(pad, N - window), key=lambda j: (-best[j], j))[: count - window]
        assert selection.indices[row, -count:].tolist() == [*sorted(chosen), *range(N - window, N)]


def test_one_layer_joined_is_fastkv(model, ids):
    shape = {"rate": 20, "layer": 2, "window": 4, "kernel": 3}
    ours, theirs = (
        run(model, kvsieve.Plan(propagate=part, evict=SnapKV(budget=15, window=4, kernel=3)), ids)
        for part in (CrossLayerTSP(joined=1, **shape), TSP(**shape))
    )
    assert torch.equal(ours.sequences, theirs.sequences) and ours.stats.deep_tokens == 20
    assert [columns(ours, layer, 1) for layer in range(LAYERS)] == [
        columns(theirs, layer, 1) for layer in range(LAYERS)
    ]


def test_two_steps_are_two_drops(model, ids):
    part = StagedTSP(rate="20%", layer=3, early=1, early_rate="50%", window=4, kernel=3)
    result = run(model, kvsieve.Plan(propagate=part), ids[:1])
    held = [columns(result, layer) for layer in range(LAYERS)]
    assert list(map(len, held)) == [60, 60, 30, 30, 12, 12] and result.stats.deep_tokens == 12
    assert set(held[4]) < set(held[2]) and held[4][-4:] == held[2][-4:] == [56, 57, 58, 59]
    # The first step is CLAA's there.
    early = run(model, kvsieve.Plan(propagate=CrossLayerTSP(rate="50%", layer=1, window=4, kernel=3)), ids[:1])
    assert columns(early, 2) == held[2]
    # The second ranks what is left: by the layers joined, whose earlier scores are those of the tokens left.
    again = run(model, kvsieve.Plan(propagate=part), ids[:1], chunk=16)
    assert [columns(again, layer) for layer in range(LAYERS)] == held and torch.equal(again.sequences, result.sequences)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "lfm2"])
@pytest.mark.parametrize(("early", "layer"), [(1, 2), (2, 2), (None, 0), (None, 1), (0, 1)])
def test_both_steps_may_fall_on_one_layer(family, early, layer):
    """Hybrids attend in few layers, so two named ones may be followed by the same: the second step is then the only."""
    model = build(family, dtype=torch.float64)
    shape = {"rate": "20%", "layer": layer, "window": 4}
    ids = tiny_prompt(1, N, seed=1, low=3, high=100)
    part = StagedTSP(early=early, early_rate="50%", **shape)
    if family != "qwen3" and layer == 2:
        with pytest.raises(UnsupportedModelError, match="after layer 2, and of the model's 4 layers only"):
            run(model, kvsieve.Plan(propagate=part), ids)
        return
    with kvsieve.attach(model, kvsieve.Plan(propagate=part)) as sieve:
        attending = sieve.context.layers
        result = sieve.generate(ids, max_new_tokens=3, do_sample=False)
    assert result.stats.deep_tokens == N // 5
    places = {next(each for each in attending if each >= at) for at, _ in part.drops(sieve.num_layers)}
    if len(places) == 1:
        once = run(model, kvsieve.Plan(propagate=CrossLayerTSP(**shape)), ids, max_new_tokens=3)
        assert torch.equal(once.sequences, result.sequences) and once.stats.kv_entries == result.stats.kv_entries


def test_steps_of_a_padded_row_are_those_of_the_row_alone(model, ids):
    part = StagedTSP(rate="20%", layer=3, early=1, early_rate="50%", window=4, kernel=3)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :PADDING], mask[1, :PADDING] = 0, 0
    together = run(model, kvsieve.Plan(propagate=part), padded, mask)
    alone = run(model, kvsieve.Plan(propagate=part), ids[1:, PADDING:])
    for layer in range(LAYERS):
        shifted = [column + PADDING for column in columns(alone, layer) if column < N - PADDING]
        assert columns(together, layer, 1) == shifted


def test_plans_and_refusals(model):
    plan = kvsieve.plan("claa", tsp_layer=3, budget="20%", paper=True)
    assert plan.propagate == CrossLayerTSP(rate=0.2, layer=3) and plan.evict.skip_layers == 4
    assert kvsieve.Plan.from_dict(plan.to_dict()) == plan
    staged = kvsieve.plan("staged", tsp_layer=4, paper=True).propagate
    assert staged.drops(6) == ((2, Budget(ratio=0.5)), (4, Budget(ratio=0.2)))
    with pytest.raises(PlanError, match="first step, after layer 5, must not come behind the second, after layer 4"):
        kvsieve.plan("staged", tsp_layer=4, early_layer=5, paper=True).propagate.source(8)
    with pytest.raises(PlanError, match="joined must be"):
        CrossLayerTSP(rate=0.2, joined=0)
    with pytest.warns(kvsieve.KvsieveWarning, match="using layer 2 of 6, the papers' choice"):
        run(model, kvsieve.Plan(propagate=StagedTSP(rate=0.5, early=0)), torch.arange(2, 42)[None])


@pytest.mark.parametrize("name", ["claa", "staged"])
def test_calibrated_as_fastkv(name):
    ours, fastkv = (kvsieve.plan(each, profile="smollm2-135m-instruct").propagate for each in (name, "fastkv"))
    assert (ours.layer, ours.rate, ours.window, ours.kernel) == (21, fastkv.rate, fastkv.window, fastkv.kernel)
