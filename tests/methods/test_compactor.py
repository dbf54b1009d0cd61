"""Compactor: against a slow definition, over chunks, padding and turns, and on a model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.core.rotation import sketch
from kvsieve.errors import PlanError
from kvsieve.methods import Compactor, CriticalKV
from kvsieve.methods.base import unrotated_keys
from layers import context, kept
from rotating import Rotating
from tiny import tiny_model, tiny_prompt

F64 = torch.float64
PADDING = [0, 17]
FIXED = {"sinks": 3, "recent": 2}
SMALL = {**FIXED, "chunk_length": 16}
# What each choice of `parts` takes.
ONLY = {"both": {**SMALL, "sketch": 5}, "attention": SMALL, "leverage": {**FIXED, "sketch": 5}}
ROUND = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def rows(groups=2, length=63, heads=2, size=8, seed=0):
    made = torch.Generator().manual_seed(seed)
    shapes = (2, heads * groups, length, size), (2, heads, length, size), (2, heads, length, size)
    return [torch.randn(shape, dtype=F64, generator=made) for shape in shapes]


def standard(scores):
    """Z-scores of [H, N] over everything."""
    flat = scores.flatten().tolist()
    mean = sum(flat) / len(flat)
    spread = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
    return (scores - mean) / spread


def slow_leverage(keys, width):
    """[H, N] of keys before rotation [H, N, D] of one row."""
    out = []
    for head in keys:
        x = head - head.mean(0)
        if width < x.shape[1]:
            x = x @ sketch(x.shape[1], width, x.device).double()
        inner = torch.linalg.inv(x.T @ x + 0.01 * torch.eye(x.shape[1], dtype=F64))
        out.append(torch.stack([row @ inner @ row for row in x]))
    return torch.stack(out)


def slow_attention(query, keys, values, chunk):
    """[H, N] of one row; query [H * G, N, D]."""
    heads, length = keys.shape[:2]
    mass = torch.zeros(heads, length, dtype=F64)
    groups = len(query) // heads
    for number, head in enumerate(query):
        for start in range(0, length, chunk):
            part = slice(start, min(start + chunk, length))
            for q in head[part]:
                mass[number // groups, part] += (keys[number // groups, part] @ q).softmax(0) / groups
    weighed = mass * values.norm(dim=-1)
    around = torch.nn.functional.pad(weighed, (1, 1))
    return (around[:, :-2] + around[:, 1:-1] + around[:, 2:]) / 3


def slow(query, keys, values, evictor, blending):
    """[H, N] scores of one row, from post-rotation queries and keys; the fixed entries get +inf."""
    length = keys.shape[1]
    middle = slice(evictor.sinks, length - evictor.recent)
    back = Rotating().rotate(0, keys[None], torch.arange(length)[None], inverse=True)[0]
    attention = standard(slow_attention(query[:, middle], keys[:, middle], values[:, middle], evictor.chunk_length))
    leverage = standard(slow_leverage(back[:, middle], evictor.sketch))
    total = {"both": attention + blending * leverage, "attention": attention, "leverage": leverage}[evictor.parts]
    scores = torch.full(keys.shape[:2], math.inf, dtype=F64)
    scores[:, middle] = total
    return scores


def seen(query, keys, values, padding=None):
    return dataclasses.replace(context(query, keys, values=values, padding=padding), model=Rotating())


@pytest.mark.parametrize("parts", ["both", "attention", "leverage"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_the_slow_definition_in_padded_batches(parts, groups):
    query, keys, values = rows(groups, seed=groups)
    evictor = Compactor(budget="40%", parts=parts, **ONLY[parts])
    ctx = seen(query, keys, values, PADDING)
    if evictor.when.observes:
        evictor.observe(ctx)
    scores = evictor.scores(ctx)
    assert torch.equal(scores, evictor.scores(ctx))
    for row, pad in enumerate(PADDING):
        parted = (part[row, :, pad:] for part in (query, keys, values))
        wanted = slow(*parted, evictor, 1 - int(0.4 * (63 - pad)) / (63 - pad))
        torch.testing.assert_close(scores[row, :, pad:], wanted, atol=1e-9, rtol=1e-9)


def test_the_sketch_is_left_out_where_it_is_as_wide_as_the_keys():
    query, keys, values = rows()
    scores = [Compactor(budget=20, parts="leverage", sketch=n).scores(seen(query, keys, values)) for n in (8, 48, 7)]
    assert torch.equal(scores[0], scores[1]) and not torch.allclose(scores[0], scores[2])
    # Leverages of all entries sum to the rank; a key far from the others has nearly all of one direction.
    keys[0, 0, 30] *= 40
    assert kept(Compactor(budget=13, parts="leverage"), seen(query, keys, values))[0][8] == 30


def test_blending_is_given_or_the_share_dropped():
    query, keys, values = rows()
    ctx = seen(query, keys, values)
    taken = {"attention": SMALL, "leverage": FIXED}
    alone = [Compactor(budget=21, parts=parts, **given).scores(ctx)[..., 3:-2] for parts, given in taken.items()]
    for blending, weight in ((0.0, 0.0), (2.5, 2.5), (None, 1 - 21 / 63)):
        both = Compactor(budget=21, blending=blending, **SMALL).scores(ctx)[..., 3:-2]
        torch.testing.assert_close(both, alone[0] + weight * alone[1])


@pytest.mark.parametrize("sizes", [(63,), (1, 62), (20, 20, 23), (2, 3, 40, 18), (61, 2)])
def test_chunks_of_a_prefill_change_nothing(sizes):
    query, keys, values = rows()
    evictor = Compactor(budget=20, **SMALL)
    whole = seen(query, keys, values, PADDING)
    wanted = evictor.scores(whole)
    state = {}
    start = 0
    for size in sizes:
        end = start + size
        part = seen(query[:, :, start:end], keys[:, :, :end], values[:, :, :end])
        valid = whole.valid[..., :end]
        lengths = tuple(max(end - pad, 0) for pad in PADDING)
        step = dataclasses.replace(part.step, start=start, num_new=size, is_last_chunk=end == 63, lengths=lengths)
        part = dataclasses.replace(part, step=step, valid=valid, stored=lengths, state=state)
        evictor.observe(part)
        # No more waits than an incomplete chunk, and the last tokens.
        assert state["query"].shape[2] < 16 + 2 + 1
        start = end
    torch.testing.assert_close(evictor.scores(part), wanted)
    assert "query" not in state


def test_unrotated_keys_are_those_before_rotation():
    keys = torch.randn(2, 3, 10, 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    ctx = context(keys, keys, padding=[0, 4])
    index = torch.stack([torch.randperm(10, generator=torch.Generator().manual_seed(head)) for head in range(3)])
    place = (index - torch.tensor([0, 4])[:, None, None]).clamp_min(0)
    turned = torch.cat([Rotating().rotate(0, keys[:, head : head + 1], place[:, head]) for head in range(3)], 1)
    ctx = dataclasses.replace(ctx, keys=turned, index=index.int().expand(2, -1, -1), model=Rotating())
    torch.testing.assert_close(unrotated_keys(ctx), keys)


@pytest.mark.parametrize("chunk", [None, 13])
def test_on_a_model_two_turns_in_a_padded_batch_are_the_row_alone(chunk):
    model = tiny_model()
    ids, mask = tiny_prompt(2, 50, seed=4), torch.ones(2, 50, dtype=torch.int64)
    ids[1, :9], mask[1, :9] = 0, 0
    plan = kvsieve.plan("compactor", budget=20, chunk_length=8, sinks=2, recent=2, sketch=6)
    with kvsieve.attach(model, plan) as sieve:
        both = sieve.generate(ids, mask, chunk=chunk, **ROUND)
        more = tiny_prompt(2, 20, seed=9)
        again = torch.cat([both.sequences, more], 1)
        seen_by_all = torch.cat([mask, torch.ones(2, 26, dtype=torch.int64)], 1)
        second = sieve.generate(again, seen_by_all, cache=both.cache, chunk=chunk, **ROUND)
        alone = sieve.generate(ids[1:, 9:], **ROUND)
        assert torch.equal(both.sequences[1, 50:], alone.sequences[0, 41:])
        own = sieve.generate(torch.cat([alone.sequences, more[1:]], 1), cache=alone.cache, **ROUND)
    assert torch.equal(second.sequences[1, -6:], own.sequences[0, -6:])
    assert second.stats.kv_entries == [20] * 4


def test_the_mass_of_a_turn_is_remembered_with_its_entries():
    query, keys, values = rows()
    evictor = Compactor(budget=20, **SMALL)
    ctx = seen(query, keys, values, PADDING)
    evictor.observe(ctx)
    full = dict(ctx.state)
    selection = evictor.select(ctx, (20, 20))
    assert ctx.state["mass"].shape == (2, 2, 20) and full["fed"].tolist() == [63, 63]
    again = dataclasses.replace(ctx, state={})
    evictor.scores(again)
    assert torch.equal(ctx.state["mass"], again.state["mass"].gather(2, selection.indices))
    # Sinks and recent entries were in no chunk, and count with the mean.
    assert bool((again.state["mass"][0, :, [0, 1, 2, -2, -1]] == 1).all())


def test_a_wrapper_may_have_it_as_base():
    query, keys, values = rows()
    plan = Plan(evict=CriticalKV(base=Compactor(budget=20, parts="leverage")))
    assert plan.evict.traits.needs == ("output_weight", "rotary") and plan.evict.traits.heads == "all"
    assert Compactor(budget=20, parts="attention").traits.needs == ()
    with kvsieve.attach(tiny_model(), plan) as sieve:
        assert sieve.generate(tiny_prompt(1, 50), **ROUND).stats.kv_entries == [20] * 4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"blending": -0.5}, "blending must be at least 0"),
        ({"blending": math.nan}, "blending"),
        ({"parts": "value"}, "parts"),
        ({"sketch": 0}, "sketch"),
        ({"chunk_length": 0}, "chunk"),
        ({"budget": 12}, "8 sinks, 4 recent entries and one more"),
    ],
)
def test_bad_parameters_are_named(given, match):
    with pytest.raises(PlanError, match=match):
        Compactor(**{"budget": 30, **given})
