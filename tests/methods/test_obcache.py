"""OBCache: its scores are the change of outputs without an entry; against a slow definition, and on a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import OBCache
from kvsieve.methods.obcache import effects
from layers import context, kept
from tiny import greedy, padded_prompt, tiny_model

F64 = torch.float64
PADDING = [0, 13]


def parts(groups=2, seed=3):
    made = torch.Generator().manual_seed(seed)
    shapes = (2, 2 * groups, 40, 8), (2, 2, 40, 8), (2, 2, 40, 6)
    return [torch.randn(shape, dtype=F64, generator=made) for shape in shapes]


def attend(query, keys, values, scale, place):
    """The logits, weights and output of one query at `place`."""
    logits = keys[: place + 1] @ query * scale
    weights = logits.softmax(0)
    return logits, weights, weights @ values[: place + 1]


def slow(query, keys, values, scale, window, form):
    """[Hq, N] of one row."""
    length = keys.shape[1]
    out = torch.zeros(len(query), length, dtype=F64)
    for head, own in enumerate(query):
        k, v = (part[head * len(keys) // len(query)] for part in (keys, values))
        for place in range(length - window, length):
            logits, weights, output = attend(own[place], k, v, scale, place)
            for at in range(place + 1):
                by_value = weights[at] * v[at]
                by_key = weights[at] * logits[at] * (v[at] - output)
                change = {"value": by_value, "key": by_key, "joint": by_value + by_key}[form]
                out[head, at] += change @ change
    return out


@pytest.mark.parametrize("form", ["value", "key", "joint"])
@pytest.mark.parametrize("block", [None, 7])
def test_equals_the_slow_definition_in_padded_batches(form, block, monkeypatch):
    if block:
        monkeypatch.setattr("kvsieve.methods.obcache.weights_of", weights_in_blocks(block))
    query, keys, values = parts()
    ctx = context(query, keys, values=values, padding=PADDING)
    found = effects(ctx, 5, form)
    for row, pad in enumerate(PADDING):
        wanted = slow(query[row, :, pad:], keys[row, :, pad:], values[row, :, pad:], ctx.scale, 5, form)
        torch.testing.assert_close(found[row, :, pad:], wanted)
        assert bool((found[row, :, :pad] == 0).all())


def weights_in_blocks(block):
    from kvsieve.core.scoring import window_weights

    def weights_of(ctx, window):
        return window_weights(ctx.asks(ctx.query[:, :, -window:]), ctx.keys, valid=ctx.valid, block=block)

    return weights_of


@pytest.mark.parametrize("form", ["value", "key", "joint"])
def test_the_scores_are_the_first_order_change_of_the_output(form):
    """Shrinking an entry a little changes the output as the score says."""
    query, keys, values = parts(groups=1)
    ctx = context(query, keys, values=values)
    found = effects(ctx, 1, form)
    step = 1e-6
    for at in (0, 17, 38):
        less_keys, less_values = keys.clone(), values.clone()
        if form != "value":
            less_keys[:, :, at] *= 1 - step
        if form != "key":
            less_values[:, :, at] *= 1 - step
        for head in range(2):
            before = attend(query[0, head, -1], keys[0, head], values[0, head], ctx.scale, 39)[2]
            after = attend(query[0, head, -1], less_keys[0, head], less_values[0, head], ctx.scale, 39)[2]
            change = ((after - before) / step).square().sum()
            assert change.item() == pytest.approx(found[0, head, at].item(), rel=1e-4)


def test_by_hand():
    """One query with equal logits 1 for two keys, so weights of a half; the output is the mean value."""
    keys = torch.tensor([1.0, 1.0, -99.0], dtype=F64)[None, None, :, None]
    query = torch.ones(1, 1, 3, 1, dtype=F64)
    values = torch.tensor([3.0, 1.0, 0.0], dtype=F64)[None, None, :, None]
    ctx = context(query, keys, values=values, scale=1.0)
    # o = 2: a v = 1.5, 0.5; a z (v - o) = 0.5, -0.5.
    wanted = {"value": [2.25, 0.25, 0], "key": [0.25, 0.25, 0], "joint": [4.0, 0.0, 0]}
    for form, scores in wanted.items():
        assert effects(ctx, 1, form)[0, 0].tolist() == pytest.approx(scores, abs=1e-9)
    assert kept(OBCache(budget=2, window=1, kernel=1), ctx) == [[0, 2]]


def test_logits_are_capped_where_the_model_caps_them():
    query, keys, values = parts(groups=1)
    ctx = dataclasses.replace(context(query, keys, values=values), softcap=0.5)
    logits = (query[0, 0, -1] @ keys[0, 0].T * ctx.scale / 0.5).tanh() * 0.5
    weights = logits.softmax(0)
    change = (weights * logits)[:, None] * (values[0, 0] - weights @ values[0, 0])
    torch.testing.assert_close(effects(ctx, 1, "key")[0, 0], change.square().sum(-1))


def test_a_padded_row_keeps_as_the_row_alone_and_chunks_change_nothing():
    ids, mask = padded_prompt(48, 7)
    with kvsieve.attach(tiny_model(), kvsieve.plan("obcache", budget=20, window=5, kernel=3, every=3)) as sieve:
        both = sieve.generate(ids, mask, **greedy(max_new_tokens=9))
        alone = sieve.generate(ids[1:, 7:], chunk=11, **greedy(max_new_tokens=9))
    assert torch.equal(both.sequences[1, 48:], alone.sequences[0, 41:])
    assert both.stats.kv_entries == [20] * 4


def test_bad_parameters_are_named():
    with pytest.raises(PlanError, match="form"):
        OBCache(budget=50, form="output")
    with pytest.raises(PlanError, match="window of 32"):
        OBCache(budget=9)
