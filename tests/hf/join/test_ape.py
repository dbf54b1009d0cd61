"""Documents at the same positions: against a definition with explicit hidden states."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvsieve
from kvsieve.cache import DenseStore
from kvsieve.hf.cache.records import ParallelDocuments

BEFORE = 6
SIZES = (17, 23, 20)
TOTAL = BEFORE + sum(SIZES)
SHIFT = max(SIZES) - sum(SIZES)
TEMPERATURE = 0.7
SCALE = 0.8


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, TOTAL + 9), generator=torch.Generator().manual_seed(4))


def joined(sieve, ids):
    """A cache with documents that were prefilled alone, with their keys divided by the temperature."""
    before, *texts = ids[:, :TOTAL].split((BEFORE, *SIZES), 1)
    caches = [sieve.prefill(torch.cat([before, text], 1)) for text in texts]
    cache = sieve.new_cache()
    for index, layer in cache.sieve_layers.items():
        parts = [other.all_layers[index] for other in caches]
        keys = [part.keys[:, :, BEFORE:] / TEMPERATURE for part in parts]
        keys, values = (
            torch.cat([parts[0].keys[:, :, :BEFORE], *keys], 2),
            torch.cat([parts[0].values[:, :, :BEFORE], *(part.values[:, :, BEFORE:] for part in parts)], 2),
        )
        columns = torch.arange(TOTAL, dtype=torch.int32).expand(1, keys.shape[1], -1)
        layer.store = DenseStore.of(keys, values, columns, None, (TOTAL,))
        layer.num_seen = TOTAL
    conversation = cache.conversation
    conversation.num_seen = TOTAL
    conversation.batch = 1
    conversation.position_shift = SHIFT
    conversation.parallel = ParallelDocuments(BEFORE, TOTAL, TEMPERATURE * SCALE)
    return cache


def by_definition(model, cache, ids):
    """Logits of the tokens after the documents, which are merged with other entries by their scaled log-sum-exp."""
    decoder = model.model
    new = ids[:, TOTAL:]
    positions = torch.arange(TOTAL, ids.shape[1])[None] + SHIFT
    hidden = decoder.embed_tokens(new)
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            project(normed).view(1, new.shape[1], -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *decoder.rotary_emb(hidden, positions))
        stored = cache.all_layers[index]
        groups = query.shape[1] // key.shape[1]
        keys, values = (
            torch.cat(pair, 2).repeat_interleave(groups, 1) for pair in ((stored.keys, key), (stored.values, value))
        )
        logits = query @ keys.transpose(2, 3) * attention.scaling
        columns = torch.arange(ids.shape[1])
        logits = logits.masked_fill(columns > columns[TOTAL:, None], float("-inf"))
        own = (columns >= BEFORE) & (columns < TOTAL)
        outs, sums = [], []
        for part, factor in ((own, TEMPERATURE * SCALE), (~own, 1.0)):
            outs.append(logits[..., part].softmax(-1) @ values[:, :, part])
            sums.append(logits[..., part].logsumexp(-1) * factor)
        weights = torch.stack(sums, -1).softmax(-1)
        mixed = weights[..., :1] * outs[0] + weights[..., 1:] * outs[1]
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(decoder.norm(hidden))


@pytest.mark.parametrize("decode", ["eager", "fused"])
@pytest.mark.parametrize("chunk", [None, 4])
@torch.no_grad()
def test_the_question_and_the_answer_are_the_definition(model, ids, chunk, decode):
    with kvsieve.attach(model, kvsieve.plan("full"), decode=decode) as sieve:
        cache = joined(sieve, ids)
        before = cache.fork()
        answer = sieve.generate(ids, cache=cache, chunk=chunk, max_new_tokens=5, do_sample=False, pad_token_id=0)
        again = sieve.generate(
            ids, cache=before.fork(), draft="lookup", max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    expected = ids
    for _ in range(5):
        token = by_definition(model, before, expected)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, token], 1)
    assert torch.equal(answer.sequences, expected)
    assert torch.equal(again.sequences, expected)


@torch.no_grad()
def test_logits_are_those_of_the_definition(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = joined(sieve, ids)
        wanted = by_definition(model, cache, ids)
        sieve.prefill(ids[:, :-1], cache=cache)
        found = sieve.feed(cache, ids[:, -1:], None, logits=1).logits
    torch.testing.assert_close(found[:, 0], wanted[:, -1], atol=1e-9, rtol=1e-9)
