"""UNComp: entropies of queries, budgets of groups of heads, and stages of layers that compute fewer tokens."""

from __future__ import annotations

import json
import math

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.lab.calibrate import Options, Prompt, measure
from kvsieve.lab.calibrate.entropies import QueryEntropies, truncated_entropy
from kvsieve.lab.calibrate.reading import read
from kvsieve.methods import UNComp, UNCompStages
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint, Profile
from layers import context
from scored import best, columns, kept_slots, moved, pooled, prompt, run, sizes, weights
from tiny import greedy, padded_prompt, tiny_model, tiny_prompt

ENTROPIES = ((0.7, 0.2), (0.3, 0.8), (0.5, 0.4))
SNAPPED = {"window": 4, "kernel": 3}


def evictor(budget, heads=ENTROPIES, **options):
    return UNComp(base=GroupedSnapKV(budget=budget, **SNAPPED), heads=heads, **options)


def entropy_by_definition(queries, largest):
    """Of one head's queries [N, D], with singular values of the covariance as in the public code."""
    mean = sum(queries) / len(queries)
    covariance = torch.zeros(queries.shape[1], queries.shape[1], dtype=torch.float64)
    for query in queries:
        unit = (query - mean) / (query - mean).norm()
        covariance += torch.outer(unit, unit)
    shares = torch.linalg.svdvals(covariance / covariance.trace())[:largest].tolist()
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(queries.shape[1])


def test_entropies_by_hand():
    plane = torch.tensor([[[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]])
    line = torch.tensor([[[4.0, 1.0], [-2.0, 1.0], [1.0, 1.0 + 1e-30], [1.0, 1.0]]])
    # Lengths and the mean do not count: two equal eigenvalues, or one.
    assert truncated_entropy(plane + 7).tolist() == pytest.approx([1.0])
    assert truncated_entropy(plane, largest=1).tolist() == pytest.approx([0.5])
    assert truncated_entropy(line).tolist() == pytest.approx([0.0], abs=1e-9)
    assert truncated_entropy(torch.ones(2, 5, 3)).tolist() == [0.0, 0.0]


def test_entropies_equal_the_definition_and_are_means_of_groups_and_texts():
    found = QueryEntropies()
    wanted = torch.zeros(2, dtype=torch.float64)
    for seed in (1, 2):
        queries = torch.randn(1, 6, 30, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        # Heads differ in how many directions their queries have.
        queries = queries * torch.linspace(0.2, 1, 40) ** torch.arange(1, 7)[:, None, None]
        found.see(context(queries, torch.zeros(1, 2, 30, 40), layer_idx=1))
        heads = [entropy_by_definition(one, 32) for one in queries[0]]
        torch.testing.assert_close(truncated_entropy(queries[0]), torch.tensor(heads, dtype=torch.float64))
        wanted += torch.tensor(heads, dtype=torch.float64).view(2, 3).mean(1) / 2
    means, numbers = found.result(3, 2)
    assert means[0] == means[2] == (0.0, 0.0)
    assert means[1] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert means[1][0] > means[1][1] > 0
    assert (numbers["highest"], numbers["lowest"]) == pytest.approx(means[1], abs=1e-4)


def test_groups_by_hand():
    four = ((0.3, 0.9, 0.1, 0.5),)
    assert evictor(10, four).weights(0) == [1, 2, 1, 2]
    assert evictor(10, four, groups=4, spread=4.0).weights(0) == [2, 4, 1, 3]
    assert evictor(10, four, groups=9, spread=4.0).weights(0) == [2, 4, 1, 3]
    assert evictor(10, four, groups=1).weights(0) == evictor(10, four, spread=1.0).weights(0) == [1, 1, 1, 1]
    # Of three groups of four heads one has two; equal entropies rank by index.
    assert evictor(10, four, groups=3, spread=3.0).weights(0) == [1, 3, 1, 2]
    assert evictor(10, ((0.5, 0.5),)).weights(0) == [1, 2]


@pytest.mark.parametrize(
    ("budget", "options", "wanted"),
    [
        (384, {}, [256, 512]),
        (64, {"spread": 7.0}, [16, 112]),
        (384, {"groups": 5}, [256, 320, 384, 448, 512]),
        (64, {"groups": 5, "spread": 7.0}, [16, 40, 64, 88, 112]),
    ],
)
def test_the_budgets_of_the_public_code(budget, options, wanted):
    entropies = (tuple(head / 40 for head in range(40)),)
    made = UNComp(base=GroupedSnapKV(budget=budget, window=8), heads=entropies, **options)
    counts = made.head_counts([0], 4000, budget)[0]
    assert counts == [count for count in wanted for _ in range(40 // len(wanted))]


def test_a_layers_total_is_kept_within_bounds():
    # No head has more than 400 entries, and the other gets the rest.
    assert evictor(384).head_counts([0, 1], 400, 384) == [[400, 368], [368, 400]]
    # The window and one more stay in the smaller group.
    assert evictor(6, spread=9.0).head_counts([0], 90, 6) == [[7, 5]]


@pytest.mark.parametrize("length", [11, 20, 57])
def test_heads_keep_their_best_entries(length):
    parts = prompt(layers=3, length=length, batch=2, seed=length)
    made = evictor(10)
    found = run(made, parts, padding=[0, 5])
    for row, pad in enumerate((0, 5)):
        size = length - pad
        counts = [[size] * 2] * 3 if size <= 10 else [[min(size, count) for count in pair]
                                                      for pair in made.head_counts([0, 1, 2], size, 10)]  # fmt: skip
        assert sizes(found, row) == counts
        assert size <= 10 or [sum(pair) for pair in counts] == [20] * 3
        for layer, (query, keys) in enumerate(parts):
            query, keys = query[row, :, pad:], keys[row, :, pad:]
            mass = weights(query, keys, 4).sum(1)[:, :-4].unflatten(0, (2, -1)).mean(1)
            for head in range(2):
                scores = pooled(mass[head].tolist(), 3, "max")
                wanted = best(scores, counts[layer][head] - 4) + list(range(size - 4, size))
                assert found[layer][row][head] == [pad + j for j in wanted]


def profile(model, entropies=(0.2, 0.7)):
    return Profile(Fingerprint.of(model), entropies=[list(entropies)] * model.config.num_hidden_layers)


def test_decode_stays_within_the_groups_budgets():
    model = tiny_model()
    plan = kvsieve.plan("uncomp", budget=24, profile=profile(model), every=4, **SNAPPED)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(tiny_prompt(size=60))
        assert [layer.store.valid.sum(-1)[0].tolist() for layer in cache.layers] == [[16, 32]] * 4
        result = sieve.generate(tiny_prompt(size=60), **greedy(max_new_tokens=9))
    # It acted 8 tokens after the prompt; the last one is not fed.
    assert [layer.store.valid.sum(-1)[0].tolist() for layer in result.cache.layers] == [[16, 32]] * 4


@pytest.mark.parametrize("stages", [None, (1, 3), "auto"])
def test_padded_rows_and_chunks_equal_rows_alone(stages):
    model = tiny_model()
    ids, mask = padded_prompt(50, 9)
    given = {} if stages is None else {"stages": stages, "rate": 0.5}
    plan = kvsieve.plan("uncomp", budget="40%", profile=profile(model), floor=0, **given, **SNAPPED)
    with kvsieve.attach(model, plan) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
        parts = sieve.prefill(ids, mask, chunk=7)
    assert columns(together, 1) == moved(columns(alone), 9)
    assert stages is not None or columns(parts, 1) == columns(together, 1)
    assert kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def stages(starts="auto", rate=0.375, **options):
    return UNCompStages(rate=rate, stages=starts, **options)


def test_stages_of_depths():
    assert stages().starts(32) == (2, 15, 26, 31)
    assert stages().starts(40) == (1, 3, 15, 23, 31, 35, 37)
    assert stages().starts(22) == (2, 6, 12, 18)
    assert stages().starts(24) == (2, 11, 20, 23)
    assert stages().starts(4) == (1, 2, 3) and stages().starts(2) == (1,)
    assert stages("1/3").starts(4) == stages([1, 3]).starts(4) == (1, 3)
    assert stages().source(32) == 1


def test_tokens_of_stages_are_those_of_the_public_code():
    assert [stages().tokens(4096, stage, 4) for stage in range(5)] == [4096, 3456, 2816, 2176, 1536]
    assert [stages(rate=1536).tokens(8192, stage, 4) for stage in range(5)] == [8192, 6528, 4864, 3200, 1536]
    # Divided in whole tokens, and a prompt of fewer than the last stage's stays whole.
    assert [stages(rate=768).tokens(1800, stage, 4) for stage in range(5)] == [1800, 1542, 1284, 1026, 768]
    assert stages(rate=1536).tokens(900, 4, 4) == 900


def test_tokens_by_hand():
    # Twelve tokens in two steps to 4: 8 in stage 1, the window of 2 among them.
    keys = torch.zeros(1, 1, 12, 2)
    keys[0, 0, 3, 0], keys[0, 0, 5, 0], keys[0, 0, 6, 1] = 3.0, 2.0, 2.5
    query = torch.zeros(1, 1, 12, 2)
    query[..., 0] = 1.0
    part = stages((2, 3), rate=4, window=2)
    ctx = context(query, keys, scale=1.0, layer_idx=1)
    # Slots of equal attention: the first ones stay.
    assert part.select(ctx).indices.tolist() == [[0, 1, 2, 3, 4, 5, 10, 11]]
    ctx.layer_idx = 2
    assert part.select(ctx).indices.tolist() == [[3, 5, 10, 11]]
    # The window's queries alone count, and look at slot 6 now.
    ctx.query[0, 0, 10:] = torch.tensor([0.0, 1.0])
    assert part.select(ctx).indices.tolist() == [[0, 6, 10, 11]]
    for layer in (0, 3):
        ctx.layer_idx = layer
        assert part.select(ctx) is None


def test_tokens_are_those_of_most_attention_over_all_heads_in_padded_batches():
    ((query, keys),) = prompt(layers=1, heads=3, groups=2, length=41, batch=2, seed=3)
    part = stages((1,), rate="30%", window=4)
    found = part.select(context(query, keys, padding=[0, 9], layer_idx=0))
    for row, pad in enumerate((0, 9)):
        size = 41 - pad
        mass = weights(query[row, :, pad:], keys[row, :, pad:], 4).sum((0, 1))[:-4]
        wanted = best(mass.tolist(), int(0.3 * size) - 4) + list(range(size - 4, size))
        real = found.indices[row, -len(wanted) :].tolist() if found.lengths else found.indices[row].tolist()
        assert real == [pad + j for j in wanted]


def test_a_stage_begins_late_where_layers_cannot_choose():
    keys = torch.zeros(1, 1, 12, 2)
    ctx = context(keys, keys, num_layers=6, layer_idx=3)
    ctx.layers = (0, 3, 5)
    part = stages((2, 3, 5), rate=3, window=2)
    # The stages from layers 2 and 3 on are reached after layer 3, which is the first that can choose.
    assert part.first_layer(6, ctx.layers) == 3
    assert part.select(ctx).indices.shape == (1, 3 + 9 // 3)


@pytest.mark.parametrize("budget", ["100%", 12])
def test_deeper_layers_compute_the_tokens_of_their_stage(budget):
    model = tiny_model()
    plan = kvsieve.plan(
        "uncomp", budget=budget, profile=profile(model), stages="1/3", rate="40%", floor=0, spread=1.0, **SNAPPED
    )
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(tiny_prompt(size=50))
    assert cache.entries() == ([50, 35, 35, 20] if budget == "100%" else [12] * 4)
    assert all(head[-4:] == [46, 47, 48, 49] for layer in columns(cache) for head in layer)


def test_calibration_measures_the_means_of_prompts(tmp_path):
    model = tiny_model()
    prompts = [Prompt(tiny_prompt(1, length, seed=length), tiny_prompt(1, 5)) for length in (40, 60)]
    made = measure(model, prompts, prompts[0], options=Options(parts=("entropies",)))
    made.save(tmp_path / "profile.json")
    found = [{}, {}]
    for each, seen in zip(prompts, found, strict=True):
        ids = torch.cat([each.ids, each.answer[:, :-1]], 1)
        read(model, Plan(), ids, lambda ctx, seen=seen: seen.update({ctx.layer_idx: ctx.query[0].double()}))
    for layer, entropies in enumerate(made.entropies):
        heads = [sum(entropy_by_definition(seen[layer][head], 32) for seen in found) / 2 for head in range(4)]
        assert entropies == pytest.approx([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2], abs=1e-6)
    plan = kvsieve.plan("uncomp", budget=20, profile=tmp_path / "profile.json", **SNAPPED)
    assert plan.evict.heads == made.entropies
    with kvsieve.attach(model, plan) as sieve:
        lengths = [layer.store.valid.sum(-1)[0].tolist() for layer in sieve.prefill(tiny_prompt(size=60)).layers]
    assert lengths == plan.evict.head_counts(range(4), 60, 20) and all(sum(pair) == 40 for pair in lengths)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: evictor(10, groups=0), "groups must be a whole number of at least 1"),
        (lambda: evictor(10, spread=0.5), "UNComp: spread must be at least 1, got 0.5"),
        (lambda: evictor(10, spread=float("nan")), "spread must be"),
        (lambda: evictor(10, groups=1, spread=3.0), "spread=3.0 has no effect with groups=1"),
        (lambda: evictor(10, (("a",),)), "UNComp: heads must be numbers"),
        (lambda: stages("2/x"), "stages must be 'auto', or the first layers of the stages"),
        (lambda: stages((3, 2)), "in ascending order"),
        (lambda: stages((2, 2)), "in ascending order"),
        (lambda: stages(()), "in ascending order"),
        (lambda: stages((0, 2)), "got .0, 2."),
        (lambda: kvsieve.plan("uncomp", stages=5), "stages must be"),
        (lambda: stages(rate="1GiB"), "rate cannot be given in bytes"),
        (lambda: kvsieve.plan("uncomp", rate="30%"), "give stages=.auto. as well"),
        (lambda: stages(rate=4), "at least 8 are needed .the window of 8."),
        (lambda: stages(window=0), "window must be a whole number of at least 1"),
        (lambda: stages((2, 4)).source(4), "begins at layer 4, and the model has 4 layers: .* layers 1..3"),
        (lambda: stages().source(1), "needs at least 2 layers, the model has 1"),
    ],
)
def test_wrong_parameters_are_refused(make, match):
    with pytest.raises(PlanError, match=match):
        make()


def test_entropies_of_another_model_and_none_are_refused():
    keys = torch.zeros(1, 2, 20, 2)
    with pytest.raises(PlanError, match="UNComp has scores of 3 layers with 2 heads each, the model has 4 with 2"):
        evictor(10).select(context(keys, keys), (10,))
    with pytest.raises(PlanError, match="holds no entropies, which uncomp needs.*--parts entropies"):
        kvsieve.plan("uncomp", profile="smollm2-135m-instruct")
    needed = "uncomp needs a profile with entropies, and none of this model"
    with pytest.raises(PlanError, match=needed), kvsieve.attach(tiny_model(), kvsieve.plan("uncomp")):
        pass


def test_heads_with_one_budget_keep_as_many_as_snapkv():
    ((query, keys),) = prompt(layers=1, heads=2, groups=2, length=40, seed=4)
    ctx = context(query, keys, num_layers=1)
    same = GroupedSnapKV(budget=12, **SNAPPED).select(ctx, (12,))
    assert kept_slots(evictor(12, ((0.4, 0.5),), groups=1).select(ctx, (12,))) == kept_slots(same)
