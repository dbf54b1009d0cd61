"""Keys that are set aside are encoded for the queries that ask for them."""

from __future__ import annotations

import copy

import pytest
import torch

import kvsieve
from kvsieve.cache.pool import BlockPool
from kvsieve.core import shaping
from kvsieve.core.codes import decode, encode
from kvsieve.core.queries import second_moments
from kvsieve.core.shaping import encode_shaped
from kvsieve.hf.compat import CACHE
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.kernels.cpu import codes as compiled
from kvsieve.methods import Rotated
from kvsieve.shared.prompt import read_shared
from tiny import tiny_model, tiny_prompt

DIM = 64
LINE = torch.zeros(4, dtype=torch.int64)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def missed(keys, query, asked):
    """Mean square of what logits of queries [Q, D] miss over encoded keys [N, T, D] of one KV row."""
    pool, codec = BlockPool(Rotated(bits=2).keys(DIM), DIM), Rotated(bits=2)
    made = pool.encode(codec, keys, LINE, LINE[:1] == 0, asked=asked)
    found = pool.decode(made, LINE, torch.float32)
    return ((found - keys) @ query.T).square().mean().item()


def moments(query):
    """Of queries [L, D] of one KV head."""
    return second_moments(query[None, None], 1)


@pytest.mark.parametrize("seed", range(3))
def test_logits_miss_less_where_queries_are_known(seed):
    """The error goes where queries hardly ask, those that were not seen as well."""
    keys, query = normal(4, 64, DIM, seed=seed), normal(96, DIM, seed=seed + 10)
    query[:, ::8] *= 8
    seen, others = query.split(48)
    assert missed(keys, others, moments(seen)) < 0.6 * missed(keys, others, None)
    # Queries of a few directions, none of which is a channel: divisors of channels alone could not tell them.
    few = normal(96, 6, seed=seed + 20) @ normal(6, DIM, seed=seed + 30)
    seen, others = few.split(48)
    assert missed(keys, others, moments(seen)) < 0.3 * missed(keys, others, None)
    # Of those that ask for all alike little is gained or lost.
    even = normal(4096, DIM, seed=3)
    assert missed(keys, even, moments(even)) == pytest.approx(missed(keys, even, None), rel=0.15)


def test_channels_that_nothing_asked_for_are_told():
    """Later queries may ask for them: of none, or of a single one, nothing is divided by numbers near 0."""
    keys, none = normal(4, 64, DIM, seed=1), torch.zeros(1, DIM, DIM)
    one = torch.eye(1, DIM)[..., None] * torch.eye(1, DIM)[:, None]
    found, single, even = (missed(keys, torch.eye(DIM), each) for each in (none, one, None))
    assert found == pytest.approx(even, rel=0.15) and single < 2 * even


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_products_with_what_keys_have_most_of_are_kept(bits):
    """Attention is after the largest products: of keys with themselves, seen by even queries, nothing is lost."""
    keys, codec = normal(4, 64, DIM, seed=2), Rotated(bits=bits)
    keys -= keys.mean((0, 1))
    pool = BlockPool(codec.keys(DIM), DIM)
    made = pool.encode(codec, keys, LINE, LINE[:1] == 0, asked=torch.eye(DIM)[None])
    found = pool.decode(made, LINE, torch.float32)
    whole, kept = keys.square().sum(-1), (keys * found).sum(-1)
    # Scales are float16, and channels are not quite even.
    assert (kept / whole - 1).abs().mean() < 0.02


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_c_kernel_chooses_the_same_codes(bits, monkeypatch):
    """Blocks of two KV rows, in no order, and a key that is 0."""
    keys, rows = normal(4, 16, DIM, seed=4), torch.tensor([1, 0, 1, 1])
    keys[2, 3] = 0
    metric, form = (
        torch.stack([moments(normal(20, DIM, seed=each))[0] for each in (5, 6)]),
        Rotated(bits=bits).values(DIM),
    )
    if not compiled.shapes(keys, len(form.levels)):
        pytest.skip("no C compiler")
    ours = encode_shaped(form, keys, Rotated(bits=bits).fit, metric, rows)
    monkeypatch.setattr(compiled, "shapes", lambda *_: False)
    monkeypatch.setattr(shaping, "_AT_ONCE", 3 * 16 * DIM)
    theirs = encode_shaped(form, keys, Rotated(bits=bits).fit, metric, rows)
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=2e-3, atol=0)
    assert (ours.packed != theirs.packed).float().mean() < 0.01
    assert ours.scale[2, 3] == 0 and not decode(form, theirs, DIM)[2, 3].any()


def test_a_scale_that_float16_does_not_hold_is_left_as_it_was(monkeypatch):
    keys, form, fit = normal(2, 4, DIM, seed=7), Rotated(bits=2).values(DIM), Rotated(bits=2).fit
    monkeypatch.setattr(compiled, "shapes", lambda *_: False)
    large = torch.full((2, 4, 1), 7e4)
    large[0] = 0.5
    monkeypatch.setattr(shaping, "_shaped", lambda levels, x, metric, codes: (codes, large[: len(x)]))
    found = encode_shaped(form, keys, fit, torch.eye(DIM)[None], torch.tensor([0, 0]))
    assert (found.scale[0] == 0.5).all() and torch.equal(found.scale[1], encode(form, keys, fit).scale[1])


def test_padding_asks_for_nothing():
    query = normal(2, 4, 8, 16, seed=0)
    valid = torch.ones(2, 1, 30, dtype=torch.bool)
    valid[1, :, :25] = False
    found = second_moments(query, 2, valid)
    assert found.shape == (4, 16, 16)
    alone = [second_moments(query[:1], 2), second_moments(query[1:, :, 3:], 2)]
    torch.testing.assert_close(found, torch.cat(alone))
    assert not second_moments(query, 2, torch.zeros_like(valid)).any()


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


IDS = tiny_prompt(1, 200, seed=3)


def after(model, plan, ids=IDS, mask=None, chunk=None):
    """Logits of a token after a prompt, and what keys of each layer that were set aside were divided by."""
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = sieve.prefill(ids, mask, chunk=chunk)
        given = {} if mask is None else {"attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
        out = model(input_ids=ids[:, -1:], **{CACHE: cache}, use_cache=True, **given).logits[:, -1]
    return out, [layer.store.evicted.keys.root for layer in cache.sieve_layers.values() if layer.store.evicted]


@pytest.fixture(scope="module")
def planted(model):
    """The same model, of which queries are larger in a pair of channels and keys smaller."""
    out, config = copy.deepcopy(model), model.config
    dim = config.hidden_size // config.num_attention_heads
    for layer in out.model.layers:
        for linear, by in ((layer.self_attn.q_proj, 16.0), (layer.self_attn.k_proj, 1 / 16)):
            linear.weight.data.unflatten(0, (-1, dim))[:, [dim // 4, dim // 4 + dim // 2]] *= by
    return out


@pytest.mark.parametrize("method, given", [("snapkv", {"paper": True}), ("knorm", {})])
def test_evicted_entries_are_divided_for_the_last_queries(planted, method, given):
    """However the prompt was read: at once, in chunks, padded beside a longer one, or once for several plans."""
    plan = kvsieve.plan(method, budget=40, rest="2bit", **given)
    _, roots = after(planted, plan)
    dim = roots[0].shape[1]
    others = [each for each in range(dim) if each not in (dim // 4, dim // 4 + dim // 2)]
    for root in roots:
        # Keys were made smaller by 16, so queries alone tell.
        assert root[:, [dim // 4, dim // 4 + dim // 2]].mean() < root[:, others].mean() / 4
    again = [after(planted, plan, chunk=50)[1]]
    mask = torch.ones(2, 230, dtype=torch.int64)
    mask[1, :30] = 0
    ids = torch.cat([torch.cat([IDS[:, :30], IDS], 1)] * 2)
    again.append([root.view(2, -1, dim)[1] for root in after(planted, plan, ids, mask)[1]])
    shared = read_shared(planted, None, IDS, window=plan.window, evictors=[plan.evict], options=ReadOptions(50))
    layers = shared.reduced(plan.evict, None, plan.rest).sieve_layers.values()
    again.append([layer.store.evicted.keys.root for layer in layers])
    for found in again:
        for one, other in zip(found, roots, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


def test_keys_may_have_bits_of_their_own(model):
    plan = kvsieve.plan("snapkv", budget=40, paper=True, rest="rotated:bits=2:key_bits=3")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        layers = sieve.prefill(IDS).sieve_layers.values()
    for layer in layers:
        aside = layer.store.evicted
        dim = aside.keys.dim
        packed = [part.codes.packed.shape[2] for part in (aside.keys, aside.values)]
        assert packed == [dim * 3 // 8, dim * 2 // 8] and aside.keys.form.balanced and not aside.values.form.balanced
