"""Drafted tokens that pass all layers in one call: the same, bit for bit, as layer by layer, taken back or not."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch

import kvsieve
from in_blocks import quantized
from kvsieve.decoding.loop import feed_rows
from kvsieve.hf.attach import attached, under
from kvsieve.hf.decode import token_layers
from kvsieve.hf.decode.token_layers import TokenLayers
from kvsieve.hf.forward.request import PassRequest
from kvsieve.kernels.cpu import prompt, token_pass
from oracle import let_drafts_know
from pairs import Pairs, SomePairs
from tiny import greedy, padded_prompt, tiny_prompt
from tiny_models import build

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="kernels are compiled, and there is no gcc"),
    pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning"),
]
PLANS = {
    "full": kvsieve.plan("full"),
    "snapkv": kvsieve.plan("snapkv", budget=40, window=4),
    "adakv": kvsieve.plan("adakv", budget=40, window=4),
    "weights": kvsieve.Plan(evict=Pairs()),
    "weights, ragged": kvsieve.Plan(evict=SomePairs()),
}
# Rows of all tokens that the products take.
MOST = {torch.float32: 16, torch.bfloat16: 32}


@pytest.fixture(autouse=True, params=["own kernel", "token kernel"])
def kernel(request, monkeypatch):
    """Some processors have a kernel of their own for a few tokens in bfloat16."""
    if request.param == "token kernel":
        monkeypatch.setattr(prompt, "reason", lambda: "switched off for this test")
    elif prompt.reason() is not None:
        pytest.skip(prompt.reason())
    return request.param


@pytest.fixture
def passes(monkeypatch):
    """Tokens of each cache in every one call."""
    found = []
    own = token_layers.through_layers

    def noted(x, cosine, sine, caches, indices):
        found.append([cache.tokens for cache in caches])
        return own(x, cosine, sine, caches, indices)

    monkeypatch.setattr(token_layers, "through_layers", noted)
    return found


@contextlib.contextmanager
def ways(model, plan, **options):
    """Attach twice: once with the one call, once without."""
    with contextlib.ExitStack() as stack:

        def begun(alone):
            if alone:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(TokenLayers, "run", lambda *_: None)
            return stack.enter_context(attached(model, plan, "fused", **options))

        yield begun


def feed(sieve, cache, ids):
    """Feed tokens that may be taken back, or one that stays."""
    mask = cache.conversation.mask
    mask = None if mask is None else torch.cat([mask, mask.new_ones(ids.shape)], 1)
    request = PassRequest(phase="decode", tentative=ids.shape[1] > 1)
    return sieve.feed(cache, ids, mask, request, logits=ids.shape[1])


def facts(cache):
    """What layers store, and what was counted."""
    layers = [layer.store for layer in cache.layers]
    tensors = [part for store in layers for part in (store.keys, store.values, store.index, store.valid)]
    weights = [store.log_weight for store in layers]
    record = cache.turn.record
    sizes = [(store.size, store.lengths, store.entries) for store in layers]
    return [*tensors, *weights], [sizes, vars(record.reads), cache.num_seen, cache.turn.decoded]


def assert_same(one, other):
    for part, wanted in zip(one[0], other[0], strict=True):
        assert (part is None and wanted is None) or torch.equal(part, wanted)
    assert one[1] == other[1]


@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("tokens", [2, 5, 9, 16])
@pytest.mark.parametrize("rows", [1, 3, "padded"])
@pytest.mark.parametrize("name", PLANS)
def test_tokens_and_entries_are_those_of_one_layer_after_another(
    name, rows, tokens, dtype, passes, kernel, monkeypatch
):
    used = []
    address = token_pass.prompt.few_address
    monkeypatch.setattr(token_pass.prompt, "few_address", lambda: used.append(1) or address())
    model = build("qwen2", dtype=dtype)
    ids, mask = padded_prompt(90, 7) if rows == "padded" else (tiny_prompt(rows, 90), None)
    drafts = tiny_prompt(len(ids), 40, seed=1)
    found = []
    for alone in (False, True):
        with ways(model, PLANS[name]) as begun, torch.no_grad():
            sieve = begun(alone)
            # A pass of any cache shows that the decoder does nothing between layers.
            feed(sieve, sieve.prefill(tiny_prompt(size=20)), drafts[:1, :1])
            cache = sieve.prefill(ids, mask)
            for layer in cache.sieve_layers.values():
                layer.store.make_room(tokens)
            states = []
            passes.clear()
            # All stay, none, some, and in each row another number.
            kept = (tokens, 0, tokens // 2, [at % tokens + 1 for at in range(len(ids))])
            for at, count in enumerate(kept):
                result = feed(sieve, cache, drafts[:, at : at + tokens])
                states.append(([result.logits], []))
                result.transaction.accept(count)
                states.append(facts(cache))
            states.append(([feed(sieve, cache, drafts[:, :1]).logits], []))
            # Buffers grow in a pass layer by layer.
            drafted = passes[:-1]
            assert alone or passes[-1] == [1]
            assert drafted == [[tokens]] * len(drafted)
            assert len(drafted) in ((3, 4) if not alone and len(ids) * tokens <= MOST[dtype] else (0,))
        found.append(states)
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    in_one = len(ids) * tokens <= MOST[dtype]
    assert bool(used) == (in_one and kernel == "own kernel" and dtype == torch.bfloat16 and "weights" not in name)


@pytest.mark.parametrize("widths", [(4, 1, 2, 5), (1, 1, 7, 1)])
def test_caches_with_and_without_drafts_pass_together(widths, passes):
    model = build("llama")
    plans = [*map(PLANS.get, ("full", "snapkv", "adakv", "weights"))]
    found = []
    for alone in (False, True):
        with ways(model, plans[0], any_plan=True) as begun, torch.no_grad():
            sieve = begun(alone)
            prompts = (tiny_prompt(size=90 - at) for at in range(4))
            caches = [under(sieve, plan).prefill(ids) for plan, ids in zip(plans, prompts, strict=True)]
            feed_rows(sieve, caches, [torch.tensor([[row + 5]]) for row in range(4)])
            passes.clear()
            states = []
            for seed in range(3):
                fed = feed_rows(sieve, caches, [tiny_prompt(size=width, seed=seed) for width in widths])
                states.append(([part for part, _ in fed], []))
                for at, (_, transaction) in enumerate(fed):
                    if transaction is not None:
                        transaction.accept(1 + (at + seed) % widths[at])
                states += map(facts, caches)
            # Buffers grow in a pass layer by layer.
            assert passes == [list(widths)] * len(passes)
            assert len(passes) in ((0,) if alone else (2, 3))
        found.append(states)
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_answers_with_drafts_take_it(name, rows, passes, monkeypatch):
    model = build("llama")
    ids = tiny_prompt(rows, 60)
    options = greedy(max_new_tokens=24, return_dict_in_generate=True)
    with kvsieve.attach(model, PLANS[name], decode="fused") as sieve:
        wanted = sieve.generate(ids, **options).sequences
        # Rows accept other numbers of them.
        let_drafts_know(monkeypatch, wanted.tolist())
        passes.clear()
        found = sieve.generate(ids, **options, draft="lookup:tokens=4:ngram=1:adapt=false")
    assert torch.equal(found.sequences, wanted)
    counts = found.stats.drafts
    assert counts.accepted and max(max(sizes) for sizes in passes) == 5
    if rows == 1:
        assert len(passes) == counts.passes


def test_weights_in_blocks_and_norms_of_heads_take_it(passes):
    model, _ = quantized(build("qwen3"))
    found = []
    for alone in (False, True):
        with ways(model, PLANS["snapkv"]) as begun, torch.no_grad():
            sieve = begun(alone)
            cache = sieve.prefill(tiny_prompt(3, 50))
            for tokens in (1, 3, 5):
                logits = feed(sieve, cache, tiny_prompt(3, tokens, seed=1)).logits
            found.append(([logits], []))
            assert passes == [[3], [5]]
    assert_same(*found)


OTHERWISE = {
    "codec": ("llama", kvsieve.plan("kivi", bits=4)),
    "reader": ("llama", kvsieve.plan("quest", budget=40, page=4)),
    "acts while decoding": ("llama", kvsieve.plan("snapkv", budget=40, window=4, every=3)),
    "view": ("llama", kvsieve.plan("perturn", budget=40)),
    "windows": ("gemma3_text", PLANS["full"]),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_plans_that_do_more_to_tokens_pass_layer_by_layer(case, passes):
    family, plan = OTHERWISE[case]
    with kvsieve.attach(build(family), plan, decode="fused") as sieve, torch.no_grad():
        cache = sieve.prefill(tiny_prompt(size=90))
        for tokens in (1, 4, 1, 4):
            feed(sieve, cache, tiny_prompt(size=tokens, seed=1))
    assert passes == []


def test_tokens_that_are_padding_pass_layer_by_layer(passes):
    with kvsieve.attach(build("llama"), PLANS["full"], decode="fused") as sieve, torch.no_grad():
        cache = sieve.prefill(tiny_prompt(2, 50))
        feed(sieve, cache, tiny_prompt(2, 1))
        mask = torch.ones(2, 55, dtype=torch.int64)
        mask[1, 52] = 0
        sieve.feed(cache, tiny_prompt(2, 4), mask, PassRequest(phase="decode"), logits=4)
    assert passes == []
