"""LU-KV: shares of heads, their measurement against the definition written a second time, and the method on a model."""

from __future__ import annotations

import dataclasses
import heapq

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.lab.calibrate import Options, Prompt, measure
from kvsieve.lab.calibrate.utility import head_shares, measured_budgets, rising
from kvsieve.methods import LUKV, ExpectedAttention, KNorm
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.methods.lukv import FlooredAttention
from kvsieve.planning.profiles import Fingerprint, Profile, load_profile
from layers import context
from scored import Given, best, columns, moved, pooled, prompt, run, sizes, weights
from small import longrope_factors
from tiny import padded_prompt, tiny_model, tiny_prompt
from tiny_models import build

# [layers][heads] at budgets of 25%, 50% and 75%.
SHARES = (((0.1, 0.3, 0.6), (0.4, 0.9, 1.0)), ((0.2, 0.5, 0.7), (0.3, 0.3, 0.7)))


def test_heads_keep_their_shares_of_the_prompt_by_hand():
    evictor = LUKV(base=Given(budget=10), shares=SHARES)
    assert evictor.head_counts([0, 1], 40, 10) == [[4, 16], [8, 12]]
    assert evictor.head_counts([0, 1], 40, 20) == [[12, 36], [20, 12]]
    # Halfway between 25% and 50%: 0.2, 0.65, 0.35 and 0.3 of 40 tokens.
    assert evictor.head_counts([0, 1], 40, 15) == [[8, 26], [14, 12]]
    # Below the lowest budget shares fall to 0, above the highest they rise to 1.
    assert evictor.head_counts([0, 1], 80, 10) == [[4, 16], [8, 12]]
    assert evictor.head_counts([0, 1], 80, 70) == [[64, 80], [68, 68]]
    # The layer that keeps everything is left out, and the other one has the whole budget: 0.1 and 0.4 give 20.
    assert evictor.head_counts([0], 40, 10) == [[4, 16]]
    # Four sinks, one recent entry: the first head cannot have 4; 35 for the others in parts of 0.4, 0.2 and 0.3.
    assert LUKV(base=FlooredAttention(budget=10), shares=SHARES).head_counts([0, 1], 40, 10) == [[5, 15], [8, 12]]


@pytest.mark.parametrize("length", [11, 20, 57])
def test_heads_keep_their_best_entries(length):
    parts = prompt(layers=2, length=length, batch=2, seed=length)
    evictor = LUKV(base=GroupedSnapKV(budget=10, window=4, kernel=3), shares=SHARES)
    found = run(evictor, parts, padding=[0, 5])
    for row, pad in enumerate((0, 5)):
        size = length - pad
        counts = evictor.head_counts([0, 1], size, 10) if size > 10 else [[size] * 2] * 2
        assert sizes(found, row) == counts and (size <= 10 or sum(map(sum, counts)) == 40)
        for layer, (query, keys) in enumerate(parts):
            mass = weights(query[row, :, pad:], keys[row, :, pad:], 4).sum(1)[:, :-4].unflatten(0, (2, -1)).mean(1)
            for head in range(2):
                wanted = best(pooled(mass[head].tolist(), 3, "max"), counts[layer][head] - 4)
                assert found[layer][row][head] == [pad + j for j in [*wanted, *range(size - 4, size)]]


class Still:
    """Facts of a model without positions."""

    def rotate(self, layer_idx, x, positions, *, inverse=False):
        return x


@pytest.mark.parametrize("weighed", [True, False])
def test_the_scorer_adds_a_floor_to_expected_attention_and_keeps_recent_entries(weighed):
    ((query, keys),) = prompt(layers=1, length=20, batch=2, seed=1)
    ctx = dataclasses.replace(context(query, keys, padding=[0, 6]), model=Still())
    plain = ExpectedAttention(budget=9, use_vnorm=weighed)
    floored = FlooredAttention(budget=9, epsilon=0.5, recent=2, use_vnorm=weighed)
    plain.observe(ctx)
    wanted = plain.scores(ctx) + (0.5 * keys.norm(dim=-1) if weighed else 0)
    wanted[:, :, -2:] = float("inf")
    torch.testing.assert_close(floored.scores(ctx), wanted)
    assert (FlooredAttention(budget=9).sinks, FlooredAttention.epsilon, FlooredAttention.recent) == (4, 0.02, 1)


def test_slopes_of_a_hull():
    assert rising([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]
    assert rising([3.0, 1.0, 5.0, 1.0, 0.0]) == [2.0] * 5
    assert rising([0.0, 3.0, 1.0, 2.5, 2.5]) == [0.0, 2.0, 2.0, 2.5, 2.5]
    assert rising([]) == []


def hull_slopes(losses):
    """Slopes of the lower convex hull of the running sum: from each corner to the point that is steepest down."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    at, out = 0, []
    while at < len(losses):
        slopes = {end: (sums[end] - sums[at]) / (end - at) for end in range(at + 1, len(sums))}
        end = max(end for end, slope in slopes.items() if slope <= min(slopes.values()) + 1e-12)
        out += [slopes[end]] * (end - at)
        at = end
    return out


def dropped_by_a_heap(worth, scores, spare):
    """Drop the cheapest rank of all heads, one by one, and note what remains at budgets of 99% to 1%."""
    layers, heads, length = worth.shape
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    prices = {}
    for place in places:
        ranks = sorted(range(length), key=lambda j: -scores[place][j])[spare:]
        prices[place] = hull_slopes([worth[place][j].item() for j in ranks[::-1]])
    kept = dict.fromkeys(places, length)
    heap = [(prices[place][0], place) for place in places]
    heapq.heapify(heap)
    out = torch.zeros(layers, heads, 99, dtype=torch.float64)
    for percent in range(1, 100):
        while sum(length - left for left in kept.values()) < round(percent / 100 * layers * heads * length) and heap:
            _, place = heapq.heappop(heap)
            if kept[place] > max(round(0.01 * length), spare):
                kept[place] -= 1
                gone = length - kept[place]
                if gone < len(prices[place]):
                    heapq.heappush(heap, (prices[place][gone], place))
        for place, left in kept.items():
            out[(*place, 99 - percent)] = left / length
    return out


@pytest.mark.parametrize(("length", "spare"), [(40, 0), (60, 5), (150, 0)])
def test_the_cheapest_ranks_of_all_heads_are_dropped(length, spare):
    make = torch.Generator().manual_seed(length)
    worth = torch.rand(3, 2, length, generator=make, dtype=torch.float64) ** 3
    # A scorer that is right in one layer, and wrong in another.
    scores = torch.rand(3, 2, length, generator=make, dtype=torch.float64)
    scores[0], scores[1] = worth[0], -worth[1]
    scores[..., :spare] = float("inf")
    found = head_shares(worth, scores, spare)
    torch.testing.assert_close(found, dropped_by_a_heap(worth, scores, spare))
    assert (found.diff(dim=-1) >= 0).all()
    assert found.min().item() == max(round(length / 100), spare) / length
    asked = torch.arange(20, 100, dtype=torch.float64) / 100
    torch.testing.assert_close(found.mean((0, 1))[19:], asked, atol=0.51 / worth.numel(), rtol=0)


def test_shares_are_measured_by_the_attention_of_answers():
    model = build("llama", dtype=torch.float64, attn_implementation="eager")
    answers = [(tiny_prompt(1, size, seed=size), tiny_prompt(1, 7, seed=1)) for size in (50, 70)]
    wanted = torch.zeros(4, 2, 99, dtype=torch.float64)
    for ids, answer in answers:
        size = ids.shape[1]
        with torch.no_grad():
            out = model(torch.cat([ids, answer[:, :-1]], 1), output_attentions=True, use_cache=True)
        worth, scores = [], []
        for layer, attention in enumerate(out.attentions):
            keys, values = (part[0, :, :size] for part in (out.past_key_values.layers[layer].keys,
                                                           out.past_key_values.layers[layer].values))  # fmt: skip
            weight = model.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (4, -1))
            norms = torch.stack([(values[head // 2] @ weight[:, head].T).norm(dim=-1) for head in range(4)])
            largest = attention[0, :, size:, :size].amax(1) * norms / norms.sum()
            worth.append(largest.unflatten(0, (2, 2)).amax(1))
            scores.append(-keys.norm(dim=-1))
        wanted += dropped_by_a_heap(torch.stack(worth), torch.stack(scores), 0) / 2
    found = measured_budgets(model, answers, Fingerprint.of(model), KNorm(budget=0.5), lambda: None)
    # Prices that are equal but for rounding may go in another order.
    assert (found - wanted).abs().max() < 0.021 and (found - wanted).abs().mean() < 1e-3


def test_a_calibrated_model_keeps_its_shares(tmp_path):
    model = tiny_model()
    prompts = [Prompt(tiny_prompt(1, length, seed=length), tiny_prompt(1, 5)) for length in (70, 90)]
    measure(model, prompts, prompts[0], options=Options(parts=("head_budgets",))).save(tmp_path / "profile.json")
    profile = load_profile(tmp_path / "profile.json")
    assert {len(shares) for layer in profile.head_budgets for shares in layer} == {99}
    at = [layer[head][19] for layer in profile.head_budgets for head in range(2)]
    assert profile.measured == {"head_budgets": {"budget": "20%", "least": min(at), "largest": max(at)}}
    assert min(at) < 0.19 < 0.21 < max(at)
    ids = tiny_prompt(size=80)
    plan = kvsieve.plan("lukv", budget="20%", floor=0, profile=profile, every=4)
    assert kvsieve.Plan.from_dict(plan.to_dict()) == plan
    ask = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with kvsieve.attach(model, plan) as sieve:
        counts = plan.evict.head_counts(range(4), 80, 16)
        assert sum(map(sum, counts)) == 8 * 16 and len({count for layer in counts for count in layer}) > 1
        assert [layer.store.valid.sum(-1)[0].tolist() for layer in sieve.prefill(ids).layers] == counts
        result = sieve.generate(ids, max_new_tokens=9, **ask)
    # It acted 8 tokens after the prompt; the last one is not fed.
    assert [layer.store.valid.sum(-1)[0].tolist() for layer in result.cache.layers] == counts


def profile(model):
    make = torch.Generator().manual_seed(3)
    shares = torch.rand(4, 2, 9, generator=make).sort(-1).values
    return Profile(Fingerprint.of(model), head_budgets=shares.tolist())


def test_padded_rows_and_chunks_equal_rows_alone():
    model = tiny_model()
    ids, mask = padded_prompt(50, 9)
    with kvsieve.attach(model, kvsieve.plan("lukv", budget="40%", floor=0, profile=profile(model))) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
        parts = sieve.prefill(ids, mask, chunk=7)
    assert columns(together, 1) == columns(parts, 1) == moved(columns(alone), 9)
    for heads in columns(together, 1):
        assert all({9, 10, 11, 12, 49} <= set(head) for head in heads)


def test_a_model_with_moving_rotary_tables_is_left_out():
    model = build("phi3", max_position_embeddings=256, rope_parameters=longrope_factors(64))
    given = Prompt(tiny_prompt(1, 40), tiny_prompt(1, 5))
    found = measure(model, [given], given, options=Options(parts=("head_budgets",)))
    assert found.head_budgets is None and "prompt's length" in found.measured["left_out"]["head_budgets"]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LUKV(shares=(("a",),)), "shares must be numbers"),
        (lambda: LUKV(shares=(((0.5, 1.5),),)), "from 0 to 1, got 1.5"),
        (lambda: FlooredAttention(budget=9, epsilon=-1.0), "epsilon must be a number of at least 0, got -1.0"),
        (lambda: FlooredAttention(budget=9, recent=-1), "recent must be a whole number of at least 0"),
        (lambda: FlooredAttention(budget=5), "4 sinks, 1 recent entries and one more"),
        (lambda: kvsieve.plan("lukv", profile="smollm2-135m-instruct"), "calibrate MODEL --parts head_budgets"),
    ],
)
def test_wrong_parameters_are_refused(make, match):
    with pytest.raises(PlanError, match=match):
        make()


def test_shares_of_another_model_and_none_are_refused():
    keys = torch.zeros(1, 2, 20, 2)
    with pytest.raises(PlanError, match="shares of 2 layers with 2 heads each, the model has 4 with 2 KV heads"):
        LUKV(base=Given(budget=9), shares=SHARES).select(context(keys, keys), (9,))
    needs = "needs a profile with head_budgets.*calibrate MODEL --parts head_budgets"
    with pytest.raises(PlanError, match=needs), kvsieve.attach(tiny_model(), kvsieve.plan("lukv")):
        pass
