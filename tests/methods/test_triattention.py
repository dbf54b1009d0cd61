"""TriAttention: scores by the definition, written a second time, and its plan on a tiny model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.lab.calibrate import Options, Prompt, measure
from kvsieve.methods import TriAttention
from kvsieve.planning.profiles import load_profile
from layers import context, kept
from small import longrope_factors, stored
from tiny import build, tiny_prompt

F64 = torch.float64
RATES = 100.0 ** -(torch.arange(4, dtype=F64) / 4)


class Rotating:
    """Facts of a made-up model whose pairs are neighbours, or halves."""

    def __init__(self, halves, rates=RATES):
        self.halves, self.rates = halves, rates

    def complex(self, x):
        pairs = x.chunk(2, -1) if self.halves else (x[..., ::2], x[..., 1::2])
        return torch.complex(*(part.contiguous() for part in pairs))

    def rotate(self, layer_idx, x, positions, *, inverse=False):
        angle = positions[:, None, :, None] * self.rates.to(x.dtype) * (-1 if inverse else 1)
        turned = self.complex(x) * torch.polar(torch.ones_like(angle), angle)
        parts = (turned.real, turned.imag)
        return torch.cat(parts, -1) if self.halves else torch.stack(parts, -1).flatten(-2)


def slow(group, keys, places, now, farthest):
    """[N] ranks of unrotated complex keys [N, F] at `places`, for unrotated queries [G, L, F]."""
    ranks = []
    for queries in group:
        centre, length = queries.mean(0), queries.abs().mean(0)
        scores = []
        for key, place in zip(keys, places, strict=True):
            offsets = [2**power for power in range(20) if 2**power <= farthest]
            phase = (centre * key.conj()).angle()
            series = [(centre.abs() * key.abs() * (RATES * (now - place + d) + phase).cos()).sum() for d in offsets]
            scores.append(sum(series) / len(series) + ((length - centre.abs()) * key.abs()).sum())
        found = torch.stack(scores)
        ranks.append((found - found.mean()) / found.std(unbiased=False))
    return torch.stack(ranks).amax(0)


def given(groups, halves, length=30):
    make = torch.Generator().manual_seed(groups)
    facts, padding = Rotating(halves), [0, 7]
    base = torch.randn(2, 2 * groups, length, 8, generator=make, dtype=F64)
    query = base + torch.randn(1, 2 * groups, 1, 8, generator=make, dtype=F64)
    keys = torch.randn(2, 2, length, 8, generator=make, dtype=F64)
    place = (torch.arange(length)[None] - torch.tensor(padding)[:, None]).clamp_min(0)
    ctx = context(facts.rotate(0, query, place), facts.rotate(0, keys, place), padding=padding)
    return dataclasses.replace(ctx, model=facts), facts.complex(query), facts.complex(keys), padding


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("groups", "farthest"), [(1, 1), (3, 100), (2, 1 << 16)])
def test_it_equals_the_slow_reference_in_padded_batches(groups, farthest, halves):
    ctx, query, keys, padding = given(groups, halves)
    evictor = TriAttention(budget=9, n_future=farthest)
    evictor.observe(ctx)
    scores = evictor.scores(ctx)
    for row, pad in enumerate(padding):
        for head, ours in enumerate(kept(evictor, ctx, row)):
            group = query[row, head * groups : (head + 1) * groups, pad:]
            wanted = slow(group, keys[row, head, pad:], range(30 - pad), 30 - pad, farthest)
            torch.testing.assert_close(scores[row, head, pad:], wanted)
            assert ours == sorted((wanted.topk(9).indices + pad).tolist())


@pytest.mark.parametrize(
    ("farthest", "wanted", "best"),
    # The series by hand: -|k|, |k|, |k|, -|k| at distances 5, 4, 3, 2, each averaged with the one before it for 2.
    [(1, [-1.0, 1.0, 2.0, -3.0], [1, 2]), (2, [-1.0, 0.0, 2.0, 0.0], [2, 3])],
)
def test_scores_of_one_band_by_hand(farthest, wanted, best):
    """Queries 2, 2, 2i, 2i: the centre is 1 + i, E|q| - |E q| is 2 - sqrt(2). A quarter turn per token."""
    facts = Rotating(True, torch.tensor([math.pi / 2], dtype=F64))
    place = torch.arange(4)[None]
    query = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]], dtype=F64)[None, None]
    lengths = torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=F64)
    keys = torch.stack([lengths, torch.zeros(4, dtype=F64)], -1)[None, None]
    ctx = dataclasses.replace(context(facts.rotate(0, query, place), facts.rotate(0, keys, place)), model=facts)
    evictor = TriAttention(budget=2, n_future=farthest)
    evictor.observe(ctx)
    scores = torch.tensor(wanted, dtype=F64) + (2 - math.sqrt(2)) * lengths
    standard = (scores - scores.mean()) / scores.std(unbiased=False)
    torch.testing.assert_close(evictor.scores(ctx)[0, 0], standard)
    assert kept(evictor, ctx) == [best]


def test_protected_entries_stay_and_do_not_count_in_the_standardisation():
    ctx, query, keys, _ = given(3, True)
    protected = torch.zeros(2, 2, 30, dtype=torch.bool)
    protected[:, :, :12] = True
    ctx = dataclasses.replace(ctx, protected=protected & ctx.valid)
    evictor = TriAttention(budget=16)
    evictor.observe(ctx)
    scores = evictor.scores(ctx)
    for row, pad in enumerate((0, 7)):
        for head, ours in enumerate(kept(evictor, ctx, row)):
            group = query[row, head * 3 : head * 3 + 3, pad:]
            wanted = slow(group, keys[row, head, 12:], range(12 - pad, 30 - pad), 30 - pad, 1 << 16)
            torch.testing.assert_close(scores[row, head, 12:], wanted)
            assert ours == [*range(pad, 12), *sorted((wanted.topk(4 + pad).indices + 12).tolist())]


def test_passes_add_up_and_sinks_stay():
    ctx, *_ = given(2, True)
    evictor = TriAttention(budget=9, sinks=3)
    evictor.observe(ctx)
    state: dict = {}
    for start, end in ((0, 5), (5, 9), (9, 30)):
        step = dataclasses.replace(ctx.step, start=start, num_new=end - start, lengths=(end, max(0, end - 7)))
        part = {name: getattr(ctx, name)[:, :, :end] for name in ("keys", "values", "index", "valid")}
        evictor.observe(dataclasses.replace(ctx, query=ctx.query[:, :, start:end], step=step, state=state, **part))
    torch.testing.assert_close(state, ctx.state)
    assert state["queries"].tolist() == [27, 20]
    assert [head[:3] for head in kept(evictor, ctx, 1)] == [[7, 8, 9]] * 2


def test_memory_is_bounded_while_decoding_and_generated_queries_count():
    plan = kvsieve.plan("triattention", budget=20, every=4)
    with kvsieve.attach(build("llama"), plan) as sieve:
        result = sieve.generate(tiny_prompt(1, 50), max_new_tokens=21, min_new_tokens=21, do_sample=False)
    assert result.cache.entries() == [20] * 4
    assert {layer.state["queries"].item() for layer in result.cache.sieve_layers.values()} == {70}


def test_a_prompt_is_kept_whole_with_answer():
    plan = kvsieve.plan("triattention", budget="100%", answer=6, every=8)
    with kvsieve.attach(build("llama"), plan) as sieve:
        cache = sieve.generate(tiny_prompt(1, 40), max_new_tokens=17, min_new_tokens=17, do_sample=False).cache
    for layer in stored(cache)[0]:
        for head in layer:
            assert head[:40] == list(range(40)) and len(head) == 46


def test_given_centres_rank_as_the_queries_they_are_the_means_of():
    ctx, *_ = given(3, False)
    own = TriAttention(budget=9)
    own.observe(ctx)
    rows = [
        TriAttention(budget=9, centres=[mean.tolist()] * 4).scores(dataclasses.replace(ctx, state={}))
        for mean in ctx.state["mean"]
    ]
    assert not TriAttention(budget=9, centres=[ctx.state["mean"][0].tolist()] * 4).when.observes
    for row, (scores, pad) in enumerate(zip(rows, (0, 7), strict=True)):
        torch.testing.assert_close(scores[row, :, pad:], own.scores(ctx)[row, :, pad:])
    assert not torch.allclose(rows[0][1, :, 7:], rows[1][1, :, 7:])


def test_calibration_averages_the_queries_of_prompts(tmp_path):
    model = build("llama")
    prompts = [Prompt(tiny_prompt(1, length, seed=length), tiny_prompt(1, 5)) for length in (40, 60)]
    measure(model, prompts, prompts[0], options=Options(parts=("q_centres",))).save(tmp_path / "profile.json")
    profile = load_profile(tmp_path / "profile.json")
    assert profile.measured == {"q_centres": {"queries": 100}}
    with kvsieve.attach(model, kvsieve.plan("triattention", budget=20)) as sieve:
        means = [[layer.state["mean"][0] for layer in sieve.prefill(prompt.ids).sieve_layers.values()]
                 for prompt in prompts]  # fmt: skip
    both = 0.4 * torch.stack(means[0]) + 0.6 * torch.stack(means[1])
    torch.testing.assert_close(torch.tensor(profile.q_centres).to(both), both, rtol=1e-3, atol=1e-6)
    plan = kvsieve.plan("triattention", budget=20, profile=profile)
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(tiny_prompt(1, 50))
    assert cache.entries() == [20] * 4 and not any(layer.state for layer in cache.sieve_layers.values())
    assert kvsieve.Plan.from_dict(plan.to_dict()) == plan


def test_calibration_leaves_out_a_model_with_moving_rotary_tables():
    model = build("phi3", max_position_embeddings=256, rope_parameters=longrope_factors(64))
    prompt = Prompt(tiny_prompt(1, 40), tiny_prompt(1, 5))
    profile = measure(model, [prompt], prompt, options=Options(parts=("q_centres",)))
    assert profile.q_centres is None and "changes with the prompt's length" in profile.measured["left_out"]["q_centres"]


def test_centres_of_another_model_are_refused():
    ctx, *_ = given(2, True)
    for centres in ([[[0.5] * 16] * 4] * 3, [[[0.5] * 16] * 2] * 4, [[[0.5] * 8] * 4] * 4):
        with pytest.raises(PlanError, match="do not fit layer 0 of 4 with 4 query heads of 8"):
            TriAttention(budget=9, centres=centres).scores(ctx)
    with pytest.raises(PlanError, match="centres must be numbers"):
        TriAttention(budget=9, centres=[1, 2])
    with pytest.raises(PlanError, match="holds no q_centres, which triattention needs"):
        kvsieve.plan("triattention", profile="smollm2-135m-instruct")


@pytest.mark.parametrize("wrong", [{"n_future": 0}, {"n_future": 1 << 17}, {"sinks": -1}, {"every": 0}])
def test_bad_parameters_are_refused(wrong):
    with pytest.raises(PlanError):
        kvsieve.plan("triattention", **wrong)
