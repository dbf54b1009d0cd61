"""Layers that read another layer's KV: one selection serves both, whatever chooses it and whenever."""

from __future__ import annotations

import pytest
import torch
from transformers import logging

import kvsieve
from kvsieve.cache import DenseStore
from kvsieve.hf.cache.states import EmptyLayer
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.request import PassRequest
from tiny import greedy, padded_prompt
from tiny_models import available, build

logging.set_verbosity_error()

NAMES = [name for name in ("gemma3n_text", "gemma4_text") if name in [family.name for family in available()]]
GREEDY = greedy(max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
PADDING = 9
PLANS = {
    "snapkv": kvsieve.plan("snapkv", budget=16, window=4, paper=True),
    "h2o": kvsieve.plan("h2o", budget=16, every=1),
    "tova": kvsieve.plan("tova", budget=16, every=1),
    "streamingllm": kvsieve.plan("streamingllm", budget=16, every=4),
}
READERS = {
    "quest": kvsieve.plan("quest", budget=16),
    "exacttopk": kvsieve.plan("exacttopk", budget=16),
    "rocketkv": kvsieve.plan("rocketkv", budget=20, window=4, kernel=5),
    "infllm": kvsieve.plan("infllm", budget=20, local=6, block=3),
    "asking": kvsieve.plan("quest", budget=16, sparse_questions=True),
}


@pytest.fixture(params=NAMES, scope="module")
def model(request):
    return build(request.param, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(60, PADDING, seed=0)


def near(one, other, rows=slice(None)):
    for mine, its in zip(one.output.logits, other.output.logits, strict=True):
        torch.testing.assert_close(mine[rows], its, atol=1e-5, rtol=0)


def hide(store, selection, reserve=0, reuse=False):
    """The same entries stay, the others are only hidden."""
    shape = (*selection.indices.shape[:2], store.capacity)
    stays = torch.zeros(shape, dtype=torch.bool)
    real = selection.real()
    source = torch.ones_like(selection.indices, dtype=torch.bool)
    stays.scatter_(2, selection.indices, source if real is None else source & real[:, None])
    stays[:, :, store.size :] = True
    store.columns = store.columns.including(valid=stays)
    store.lengths = selection.lengths or (selection.indices.shape[2],) * shape[0]


def test_evicting_is_masking_for_those_who_read_it_too(model, prompts, monkeypatch):
    ids, mask = prompts
    with kvsieve.attach(model, PLANS["snapkv"]) as sieve:
        found = sieve.generate(ids, mask, **GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(DenseStore, "keep", hide)
            masked = sieve.generate(ids, mask, **GREEDY)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        full = sieve.generate(ids, mask, **GREEDY)
    near(found, masked)
    # Until the prompt is complete nothing is missing, afterwards much is.
    torch.testing.assert_close(found.output.logits[0], full.output.logits[0], atol=1e-5, rtol=0)
    assert (found.output.logits[1] - full.output.logits[1]).abs().max() > 1e-3
    layers = found.cache.all_layers
    readers = [layer for layer in layers if isinstance(layer, EmptyLayer)]
    assert readers and {layer.source for layer in readers} == found.cache.producers
    assert any(found.stats.kv_entries[source] == 16 for source in found.cache.producers)
    assert all(found.stats.kv_entries[layers.index(layer)] == 0 for layer in readers)


@pytest.mark.parametrize("name", [*PLANS, *READERS])
def test_rows_chunks_and_copies(model, prompts, tmp_path, name):
    ids, mask = prompts
    with kvsieve.attach(model, {**PLANS, **READERS}[name]) as sieve:
        both = sieve.generate(ids, mask, **GREEDY)
        assert both.stats.applied
        near(both, sieve.generate(ids[1:, PADDING:], **GREEDY), slice(1, None))
        near(sieve.generate(ids, mask, chunk=13, **GREEDY), both)
        more = torch.cat([both.sequences, ids[:, 20:27]], 1)
        real = torch.cat([mask, torch.ones(2, more.shape[1] - 60, dtype=mask.dtype)], 1)
        sieve.save(both.cache, tmp_path / "talk.safetensors")
        caches = [both.cache.fork(), sieve.load(tmp_path / "talk.safetensors").cache, both.cache]
        taken = both.cache.snapshot()
        answers = [sieve.generate(more, real, cache=cache, **GREEDY) for cache in caches]
        both.cache.rollback(taken)
        answers.append(sieve.generate(more, real, cache=both.cache, **GREEDY))
    for answer in answers[1:]:
        assert all(map(torch.equal, answer.output.logits, answers[0].output.logits))


@pytest.mark.parametrize("name", ["h2o", "streamingllm"])
def test_evicting_while_decoding_bounds_memory(model, prompts, name):
    """The step that evicts attends before it does; those who share read what was there then."""
    ids, mask = prompts
    with kvsieve.attach(model, PLANS[name]) as sieve:
        found = sieve.generate(ids, mask, **{**GREEDY, "max_new_tokens": 20})
        assert max(found.cache.entries()[index] for index in found.cache.sieve_layers) <= 16 + 4
        # Each token by itself, as plain calls of the model.
        cache = sieve.prefill(ids[:1])
        alone = sieve.generate(ids[:1], **{**GREEDY, "max_new_tokens": 20})
        seen = []
        with torch.no_grad():
            for token in alone.sequences[0, 60:-1]:
                seen.append(model(token[None, None], **{CACHE: cache}).logits[:, -1])
    torch.testing.assert_close(torch.stack(seen).float(), torch.stack(alone.output.logits[1:]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", READERS)
def test_several_given_tokens_read_what_single_ones_do(model, prompts, name):
    """In a layer that shares, each token reads among what was stored when it came, too."""
    ids, _ = prompts
    answer = torch.tensor([[5, 9, 17, 33, 2, 71]])
    with kvsieve.attach(model, READERS[name]) as sieve, torch.no_grad():
        cache = sieve.prefill(ids[:1])
        one_by_one, at_once = cache.fork(), cache.fork()
        wanted = [
            sieve.feed(one_by_one, token[None, None], None, PassRequest(phase="decode"), logits=1).logits[:, -1]
            for token in answer[0]
        ]
        found = sieve.feed(at_once, answer, None, PassRequest(phase="decode"), logits=6).logits[0]
        torch.testing.assert_close(found, torch.cat(wanted), atol=1e-8, rtol=0)
        question = torch.cat([ids[:1], answer], 1)
        asked = sieve.generate(question, cache=cache, **GREEDY)
        assert asked.stats.traffic is not None and asked.stats.traffic.entries <= 32
