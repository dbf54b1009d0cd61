"""Finch: scores by hand, and the whole of it against a slow reference that moves the keys itself."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

import kvsieve
from kvsieve.errors import PlanError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.methods import Finch
from layers import context
from rotating import turned
from spying import seen_by_attention, softmax_rows
from tiny import greedy, padded_prompt
from tiny_models import build

PADDING = 9
QUESTION, CHUNK = 5, 16
GREEDY = greedy(max_new_tokens=4)
LOGITS = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(53, PADDING, seed=2)


def slow(model, ids, budget):
    """Tokens kept per layer and head of a prompt [N], and the logits [V] after it, without kvsieve."""
    n, context_length = len(ids), len(ids) - QUESTION
    room = budget - QUESTION
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    held = {(layer, head): [] for layer in range(layers) for head in range(heads)}
    store = {}

    def feed(tokens, past):
        cache = DynamicCache()
        for layer in range(layers) if past else ():
            keys, values = (torch.stack([store[layer, head][part] for head in range(heads)]) for part in (0, 1))
            cache.update(keys[None], values[None], layer)
        positions = torch.arange(past, past + len(tokens))[None]
        out = model(tokens[None], position_ids=positions, **{CACHE: cache}, use_cache=True)
        return out.logits[0, -1], cache

    with seen_by_attention(model) as seen, torch.no_grad():
        past = 0
        for start in range(0, context_length, CHUNK):
            end = min(start + CHUNK, context_length)
            _, cache = feed(torch.cat([ids[start:end], ids[context_length:]]), past)
            keep = max(1, room * end // context_length)
            for layer, (query, keys) in seen.items():
                groups, total = query.shape[1] // heads, keys.shape[2]
                for head in range(heads):
                    score = [0.0] * (total - QUESTION)
                    for mine in query[0, head * groups : (head + 1) * groups, -QUESTION:]:
                        first = total - QUESTION
                        rows = softmax_rows(
                            mine, keys[0, head], mine.shape[-1] ** -0.5, lambda t, j, f=first: j <= f + t
                        )
                        for t, row in enumerate(rows):
                            for j in range(len(score)):
                                score[j] += row[j] * (first + t + 1)
                    chosen = sorted(sorted(range(len(score)), key=lambda j: (-score[j], j))[:keep])
                    known = held[layer, head] + list(range(start, end))
                    held[layer, head] = [known[j] for j in chosen]
                    moved = turned(model, keys[0, head, chosen], [new - old for new, old in enumerate(chosen)])
                    store[layer, head] = moved, cache.layers[layer].values[0, head, chosen]
            past = keep
        logits, _ = feed(ids[context_length:], past)
    return {at: kept + list(range(context_length, n)) for at, kept in held.items()}, logits


def test_all_of_it_equals_the_slow_reference_in_a_padded_batch(model, prompts):
    ids, mask = prompts
    with kvsieve.attach(
        model, kvsieve.plan("finch", budget="40%", question_tokens=QUESTION, chunk_length=CHUNK)
    ) as sieve:
        results = [sieve.generate(ids, mask, chunk=chunk, **LOGITS) for chunk in (None, 7)]
        alone = sieve.generate(ids[1:, PADDING:], **LOGITS)
    assert torch.allclose(alone.output.logits[3][0], results[0].output.logits[3][1], atol=1e-6)
    for row, pad in enumerate((0, PADDING)):
        budget = int(0.4 * (53 - pad))
        wanted, logits = slow(model, ids[row, pad:], budget)
        for result in results:
            cache = result.cache
            assert torch.allclose(result.output.logits[0][row], logits.float(), atol=1e-6)
            assert torch.equal(result.sequences[:, :53], ids)
            for index, layer in enumerate(cache.layers):
                given = cache.conversation.short_prompt.as_given(layer.store.index, index)[row, :, -budget - 3 : -3]
                for head, columns in enumerate(given.tolist()):
                    assert columns == [pad + j for j in wanted[index, head]]
    # The longer row's budget, contiguous positions, and three tokens generated.
    assert results[0].stats.kv_entries == [21] * 4 and results[0].cache.num_seen == 21 + 3
    assert results[0].stats.applied and results[0].stats.kv_asked == 21


def test_keeping_everything_is_the_model_itself(model, prompts):
    ids, mask = prompts
    theirs = model.generate(ids, attention_mask=mask, **GREEDY)
    plan = kvsieve.plan("finch", budget="100%", question_tokens=QUESTION, chunk_length=CHUNK)
    with kvsieve.attach(model, plan) as sieve:
        ours = sieve.generate(ids, mask, **GREEDY)
    assert torch.equal(ours.sequences, theirs) and not ours.stats.applied


def test_beams_and_a_later_turn_that_reads_everything_afresh(model, prompts):
    ids, mask = prompts
    with kvsieve.attach(
        model, kvsieve.plan("finch", budget="40%", question_tokens=QUESTION, chunk_length=CHUNK)
    ) as sieve:
        beams = [sieve.generate(ids[1:, pad:], mask[1:, pad:], num_beams=3, **GREEDY) for pad in (0, PADDING)]
        assert torch.equal(beams[0].sequences[:, 53:], beams[1].sequences[:, 53 - PADDING :])
        first = sieve.generate(ids, mask, **GREEDY)
        more = torch.cat([first.sequences, ids[:, -8:]], 1)
        second = sieve.generate(more, cache=first.cache, **GREEDY)
        fresh = sieve.generate(more, torch.cat([mask, torch.ones_like(more[:, 53:])], 1), **GREEDY)
    assert torch.equal(second.sequences, fresh.sequences)
    assert second.stats.kv_entries == fresh.stats.kv_entries == [int(0.4 * 65)] * 4


def test_scores_by_hand():
    """Two question queries at slots 2-3 over two entries; keys log 2, 0, 0, 0: weights 3 and 4 for entries seen."""
    keys = torch.tensor([math.log(2), 0, 0, 0], dtype=torch.float64).view(1, 1, 4, 1)
    ctx = context(torch.ones(1, 1, 4, 1, dtype=torch.float64), keys, scale=1.0)
    # Rows (2, 1, 1)/4 and (2, 1, 1, 1)/5, times 3 and 4, mean.
    wanted = torch.tensor([[[(2 / 4 * 3 + 2 / 5 * 4) / 2, (1 / 4 * 3 + 1 / 5 * 4) / 2]]], dtype=torch.float64)
    assert torch.allclose(Finch(budget=3, question_tokens=2).scores(ctx), wanted)


def test_what_cannot_be_honoured_is_refused(model, prompts):
    ids, mask = prompts
    with pytest.raises(PlanError, match="say how many of the prompt's last tokens"):
        kvsieve.plan("finch")
    with pytest.raises(PlanError, match="at least 6 are needed"):
        kvsieve.plan("finch", budget=5, question_tokens=5)
    plan = kvsieve.plan("finch", budget="40%", question_tokens=QUESTION)
    with pytest.raises(PlanError, match="cannot be combined"):
        kvsieve.Plan(propagate=kvsieve.methods.TSP(rate=0.5, layer=1), evict=plan.evict)
    with kvsieve.attach(model, plan):
        with pytest.raises(UnsupportedOptionError, match="reads a prompt in steps of its own"):
            model.generate(ids, attention_mask=mask, **GREEDY)
    with pytest.raises(UnsupportedModelError, match=r"sliding window of 16 in 2 of 4 \(0, 2\).*cannot take back"):
        kvsieve.attach(build("gemma3_text"), plan).__enter__()
