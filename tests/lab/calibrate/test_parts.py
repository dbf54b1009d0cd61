"""What calibration measures, against computations by hand and on made-up numbers."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.lab.calibrate import Options, distances, pooling, ranks
from kvsieve.lab.calibrate.distances import Distance, choose_layer
from kvsieve.lab.calibrate.filters import QuerySums, correlation, directions
from kvsieve.lab.calibrate.heads import RetrievalScores, kept_by_streaming
from kvsieve.lab.calibrate.reading import divergence, following, greedy, read
from kvsieve.methods import TSP, SnapKV
from kvsieve.shared.prompt import read_shared
from layers import context
from tiny import tiny_model, tiny_prompt
from tiny_models import build

LAYERS = 6


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, 90, seed=3)


@pytest.fixture(scope="module")
def answer():
    return tiny_prompt(1, 7, seed=4)


def by_hand(model, plan, ids, answer):
    """Final hidden states of the prompt and log-probabilities of the answer, as a user would get them."""
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = sieve.new_cache()
        out = model(input_ids=ids, **{CACHE: cache}, output_hidden_states=True)
    with kvsieve.attach(model, Plan()) as sieve, torch.no_grad():
        more = model(input_ids=answer[:, :-1], **{CACHE: sieve.adopt(cache)}, use_cache=True)
    return out.hidden_states[-1][0], more.logits.log_softmax(-1)


@pytest.mark.parametrize("layer", [0, 3, 4])
def test_the_distance_is_that_of_two_runs(model, ids, answer, layer):
    pooled = SnapKV(budget="50%", window=5, kernel=7, pooling="max")
    plan = Plan(propagate=TSP(rate=0.3, layer=layer, window=5, kernel=7, pooling="max"))
    full, truth = by_hand(model, Plan(), ids, answer)
    ours, given = by_hand(model, plan, ids, answer)
    assert len(ours) == 27
    hidden, _ = read(model, Plan(), ids)
    shared = read_shared(model, None, ids, window=5)
    reference = following(model, shared.reduced(None), answer)
    found = distances.distance(model, ids, layer, 0.3, pooled, hidden, answer, reference)
    expected = [
        ((full[-1] - ours[-1]) ** 2).sum(),
        ((full[-5:] - ours[-5:]) ** 2).sum(-1).mean(),
        (full[-1] ** 2).sum(),
    ]
    assert [found.last, found.window, found.norm] == pytest.approx([each.item() for each in expected], rel=1e-5)
    assert found.kl == pytest.approx((truth.exp() * (truth - given)).sum(-1).mean().item(), rel=1e-4)
    assert found.last > 0 and found.relative == pytest.approx(found.last / found.norm)
    nothing = distances.distance(model, ids, layer, 1.0, pooled, hidden, answer, reference)
    assert nothing.last == nothing.window == nothing.kl == 0


def made_up(relative, kl=None):
    return [Distance(100 * each, 0.0, 100.0, k) for each, k in zip(relative, kl or [0.0] * len(relative), strict=True)]


def test_the_rule_settled():
    # Layer 1 is near by luck; from 3 on all are.
    assert choose_layer(made_up([0.5, 0.01, 0.4, 0.03, 0.02, 0.01]), "settled", None) == (3, True)
    assert choose_layer(made_up([0.5, 0.01, 0.4, 0.03, 0.02, 0.01]), "settled", 0.5) == (0, True)
    assert choose_layer(made_up([0.01] * 4, [2.0, 0.01, 0.11, 0.02]), "settled", None) == (3, True)
    assert choose_layer(made_up([0.5, 0.1, 0.2]), "settled", None) == (1, False), "the nearest, and it is said"


def test_the_rule_argmin_is_equation_3():
    found = made_up([0.5, 0.11, 0.4, 0.1, 0.12])
    assert choose_layer(found, "argmin", None) == (3, True)
    assert choose_layer(found, "argmin", 0.1) == (1, True), "the earliest within a tenth of the smallest"
    assert choose_layer(found[:1], "argmin", None) == (0, True)


def test_means_are_taken_before_shares():
    found = distances.mean([Distance(1.0, 2.0, 10.0, 0.5), Distance(3.0, 4.0, 30.0, 1.5)])
    assert found == Distance(2.0, 3.0, 20.0, 1.0) and found.relative == 0.1


def test_candidates_end_before_the_last_layer(model):
    assert distances.candidates(model, LAYERS, 0.2, None) == ([0, 1, 2, 3, 4], None)
    assert distances.candidates(model, LAYERS, 0.2, 2)[0] == [0, 1, 2]
    assert distances.candidates(model, LAYERS, 0.2, 99)[0] == [0, 1, 2, 3, 4]
    found, reason = distances.candidates(build("gemma3n_text"), 4, 0.2, None)
    assert found == [] and reason
    local = build(
        "qwen2", use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"] + ["full_attention"] * 3
    )
    assert distances.candidates(local, 4, 0.2, None)[0] == [1, 2]


def test_pooling_is_compared_with_full_kv(model, ids, answer):
    options = Options(budget="30%", kernels=(3, 7), windows=(4, 8, 27), poolings=("avg", "max"))
    evictors = pooling.settings(options, 90)
    assert [(each.window, each.pooling, each.kernel) for each in evictors] == [
        (window, kind, kernel) for window in (4, 8) for kind in ("avg", "max") for kernel in (3, 7)
    ], "a window of all 27 entries leaves nothing to choose"
    shared = read_shared(model, None, ids, window=8)
    found = pooling.distances(model, shared, evictors, answer)
    _, truth = by_hand(model, Plan(), ids, answer)
    for index in (0, 3, 5, 7):
        _, given = by_hand(model, Plan(evict=evictors[index]), ids, answer)
        assert found[index] == pytest.approx((truth.exp() * (truth - given)).sum(-1).mean().item(), rel=1e-4)
    assert pooling.choose(evictors, [3.0, 1.0, 2.0, 1.0, 5.0, 5.0, 5.0, 5.0]) == 1
    assert pooling.choose(evictors, [3.0, 1.0, 1.09, 1.0, 1.05, 1.2, 5.0, 5.0]) == 4, "kernel 3 serves as well as 7"
    with pytest.raises(InputError, match="keeps 3 entries of a prompt of 10.*narrowest window of 4"):
        pooling.settings(options, 10)


def test_greedy_answers_are_those_of_generate(model, ids):
    with kvsieve.attach(model, Plan()) as sieve:
        expected = sieve.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=[127]).sequences[:, 90:]
    shared = read_shared(model, None, ids, window=1)
    assert torch.equal(greedy(model, shared.cache, shared.logits, {127}, 6), expected)
    tokens = expected[0].tolist()
    for stop in (tokens[0], tokens[2]):
        length = next((i + 1 for i in range(1, 6) if tokens[i] == stop), 6)
        assert torch.equal(greedy(model, shared.cache, shared.logits, {stop}, 6), expected[:, :length])


def test_divergence_of_rows():
    truth = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    given = torch.stack([truth[0], torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()])
    expected = (0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()) / 2
    assert divergence(truth, given) == pytest.approx([0.0, expected.item()], abs=1e-6)


def test_the_trace_is_asls_own(model, ids):
    pooled = SnapKV(budget="50%", window=4, kernel=3)
    found = ranks.trace(model, ids, 0.3, pooled, 3)
    plan = kvsieve.plan("asl", budget=0.3, tau=0.0, observed=3, first=2, window=4, kernel=3, full_before=True)
    with kvsieve.attach(model, plan) as sieve:
        report = sieve.generate(ids, max_new_tokens=1, do_sample=False).stats.report
    assert found == pytest.approx(report["relative_variance"][0]) and len(found) == LAYERS - 1 - 2
    assert [ranks.observed_layers(n) for n in (4, 6, 16, 30, 80)] == [2, 3, 8, 8, 8]


def test_asl_selects_at_or_after_the_layer():
    # Layers 7..12. From 8 on: 1, 0.75, 0.5, 0.25 and 1, 0.8, 0.6, 0.9: tau may be 0.6 before layer 11 would be missed.
    traces = [[1.0, 4.0, 3.0, 2.4, 1.0, 0.5], [1.0, 5.0, 4.0, 3.5, 2.0, 4.5]]
    found = ranks.recommend(traces, start=7, layer=11)
    assert found.first == 8 and found.tau == 0.6 and found.layers == [11, 11] and found.adapts
    # What was recommended holds when ASL's own rule is applied to the traces.
    for values, layer in zip(traces, found.layers, strict=True):
        relative = [value / values[found.first - 7] for value in values[found.first - 7 :]]
        assert next(found.first + i for i, v in enumerate(relative) if v < found.tau) == layer
    # One prompt settles, the other never.
    found = ranks.recommend([[1.0, 1.0, 0.5], [1.0, 2.0, 3.0]], start=3, layer=5)
    assert found.first == 3 and found.tau == 1.0 and found.layers == [5, None]
    # Ranks that only move apart: every prompt selects at the layer itself.
    rising = ranks.recommend([[1.0, 2.0, 3.0, 4.0]], start=3, layer=5)
    assert rising == ranks.Recommendation(5, 1.01, [5], False)
    assert ranks.recommend([[1.0, 0.5]], start=3, layer=1).first == 3, "not before the first that can be judged"
    still = ranks.recommend([[0.0, float("inf"), float("inf"), 1.0]], start=3, layer=6)
    assert still == ranks.Recommendation(6, 1.01, [6], False), "no variance to compare with"


@pytest.mark.parametrize("groups", [1, 2, 3], ids=lambda g: f"G{g}")
def test_retrieval_scores_equal_a_slow_reference(groups):
    generator = torch.Generator().manual_seed(groups)
    heads, prompt, count, dim = 2, 64, 5, 4
    length = prompt + count - 1
    assert kept_by_streaming(prompt) == (8, 16) and kept_by_streaming(1024) == kept_by_streaming(9999) == (128, 256)
    found, score, beyond = RetrievalScores(), [0.0] * heads, [0.0] * heads
    for _ in range(2):
        query = torch.randn(1, heads * groups, length, dim, generator=generator, dtype=torch.float64)
        keys = torch.randn(1, heads, length, dim, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 9, (1, prompt), generator=generator)
        answer = torch.randint(0, 9, (1, count), generator=generator)
        found.see(context(query, keys, layer_idx=1), ids, answer)
        found.prompts += 1
        for head in range(heads * groups):
            for step in range(count):
                place = prompt - 1 + step
                logits = keys[0, head // groups, : place + 1] @ query[0, head, place] / dim**0.5
                weights = logits.softmax(0).tolist()
                for j in range(8, 48):
                    wanted = answer[0, step]
                    share = weights[j] / (2 * groups * count)
                    beyond[head // groups] += share
                    if ids[0, j] == wanted or (j + 1 < 48 and ids[0, j + 1] == wanted):
                        score[head // groups] += share
    assert found.result(found.scores, 3, heads)[1] == pytest.approx(score, abs=1e-4)
    assert found.result(found.beyond, 3, heads)[1] == pytest.approx(beyond, abs=1e-4)
    assert found.result(found.scores, 3, heads)[::2] == [[0.0, 0.0]] * 2, "layers that were never shown"


def test_a_head_that_fetches_scores_one_and_others_zero():
    # Heads look at slot 40, which holds the token wanted; at 41; at 30, far back as well; at the newest.
    ids, answer = torch.zeros(1, 96, dtype=torch.int64), torch.full((1, 3), 7)
    ids[0, 40] = 7
    keys = torch.zeros(1, 4, 98, 2)
    for head, place in enumerate((40, 39, 30, 95)):
        keys[0, head, place] = 50.0
    found = RetrievalScores(prompts=1)
    found.see(context(torch.ones_like(keys), keys), ids, answer)
    assert found.result(found.scores, 1, 4)[0] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=1e-3)
    assert found.result(found.beyond, 1, 4)[0] == pytest.approx([1.0, 1.0, 1.0, 0.0], abs=1e-3)


def test_directions_are_recovered_from_queries():
    """Queries along +-u with a positive mean; two query heads share a KV head."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    heads = []
    for head in range(4):
        along = torch.randn(500, 1, generator=generator, dtype=torch.float64) * 3 + (2 if head % 2 else -2)
        heads.append(along * axes[head // 2] + 0.1 * torch.randn(500, 8, generator=generator, dtype=torch.float64))
    query = torch.stack(heads)[None]
    sums = QuerySums()
    for part in query.split([200, 300], 2):
        sums.see(context(part, part[:, ::2], layer_idx=1))
    layer = sums.result(2, 2, 8)
    assert torch.equal(layer[0], torch.zeros(2, 8, dtype=torch.float64))
    # Heads of a group point opposite ways: their filters cancel but for noise. So look at them one by one.
    single = directions(sums.moments[1], sums.sums[1], 4)
    for head in range(4):
        principal = torch.linalg.svd(query[0, head]).Vh[0]
        assert abs(principal @ single[head]).item() == pytest.approx(1.0)
        expected = axes[head // 2] * (1 if head % 2 else -1)
        assert (single[head] @ expected).item() > 0.999 and query[0, head].mean(0) @ single[head] > 0
    torch.testing.assert_close(layer[1].norm(dim=-1), torch.ones(2, dtype=torch.float64))
    same = directions(sums.moments[1][[0, 0]], sums.sums[1][[0, 0]], 1)
    torch.testing.assert_close(same, single[:1])


def test_the_check_tells_a_right_sign_from_a_wrong_one():
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, 1, 80, 4, generator=generator, dtype=torch.float64)
    query = torch.tensor([2.0, 0.0, 0.0, 0.0]).expand(1, 3, 80, 4).double()
    ctx, right = context(query, keys), torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    assert correlation(ctx, right) == pytest.approx([1.0], abs=1e-3)
    assert correlation(ctx, -right) == pytest.approx([-1.0], abs=1e-3)


def test_a_watcher_sees_every_layer_and_drops_nothing(model, ids):
    seen = []
    hidden, cache = read(model, Plan(), ids, lambda ctx: seen.append((ctx.layer_idx, ctx.query.shape[2])))
    assert seen == [(layer, 90) for layer in range(LAYERS)] and cache.entries() == [90] * LAYERS
    torch.testing.assert_close(hidden, read(model, Plan(), ids)[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": ("tps",)}, "unknown part 'tps'.*did you mean 'tsp'"),
        ({"parts": ()}, "no part"),
        ({"rule": "knee"}, "settled, argmin"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"max_layer": -1}, "max_layer"),
        ({"budget": "0%"}, "Budget"),
    ],
    ids=str,
)
def test_bad_options_are_refused(given, message):
    with pytest.raises(PlanError, match=message):
        Options(**given)
