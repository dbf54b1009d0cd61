"""Key re-rotation: against a slow definition that moves the keys itself, and the bases it takes."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvsieve
from kvsieve import Plan
from kvsieve.errors import PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.methods import H2O, AdaKV, ChunkKV, Compactor, CurDKV, ExpectedAttention, KNorm, Rerotation, SnapKV
from rotating import turned
from small import stored
from tiny import greedy, padded_prompt, tiny_model, tiny_prompt

PADDING, QUESTION = 9, 5
GREEDY = greedy(max_new_tokens=4)
LOGITS = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}


def slow(model, ids, budget, chunk):
    """K-norm's tokens per layer and head of the context of a prompt [N], and the logits [V] after its question."""
    context, room = len(ids) - QUESTION, budget - QUESTION
    heads = model.config.num_key_value_heads
    places = [(layer, head) for layer in range(model.config.num_hidden_layers) for head in range(heads)]
    tokens, store = {place: [] for place in places}, {}

    def feed(part, past):
        cache = DynamicCache()
        for layer in range(model.config.num_hidden_layers) if past else ():
            keys, values = (torch.stack([store[layer, head][of] for head in range(heads)]) for of in (0, 1))
            cache.update(keys[None], values[None], layer)
        with torch.no_grad():
            positions = torch.arange(past, past + len(part))[None]
            out = model(part[None], position_ids=positions, **{CACHE: cache}, use_cache=True)
        return out.logits[0, -1], cache

    past = 0
    for start in range(0, context, chunk):
        end = min(start + chunk, context)
        _, cache = feed(ids[start:end], past)
        past = max(1, room * end // context)
        for layer, head in places:
            keys, values = cache.layers[layer].keys[0, head], cache.layers[layer].values[0, head]
            norms = keys.norm(dim=-1).tolist()
            best = sorted(sorted(range(len(norms)), key=lambda at: (norms[at], at))[:past])
            known = [*tokens[layer, head], *range(start, end)]
            tokens[layer, head] = [known[at] for at in best]
            store[layer, head] = turned(model, keys[best], [new - old for new, old in enumerate(best)]), values[best]
    return tokens, feed(ids[context:], past)[0]


@pytest.mark.parametrize("chunk", [None, 16])
def test_equals_the_slow_definition_in_a_padded_batch(chunk):
    model, (ids, mask) = tiny_model(), padded_prompt(53, PADDING, seed=2)
    plan = kvsieve.plan("rerotation", base="knorm", budget=20, question_tokens=QUESTION, chunk_length=chunk)
    with kvsieve.attach(model, plan) as sieve:
        results = [sieve.generate(ids, mask, chunk=size, **LOGITS) for size in (None, 7)]
    for row, pad in enumerate((0, PADDING)):
        _, logits = slow(model, ids[row, pad:], 20, chunk or 53)
        for result in results:
            torch.testing.assert_close(result.output.logits[0][row].double(), logits, atol=1e-5, rtol=1e-4)
    assert results[0].stats.kv_entries == [20] * 4


def test_later_tokens_follow_the_kept_ones():
    """Keys of the first layer are those of their tokens, at the positions 0, 1, ... up to the newest."""
    model, ids = tiny_model(), tiny_prompt(1, 40)
    with kvsieve.attach(model, kvsieve.plan("rerotation", base="streamingllm", budget=12)) as sieve:
        result = sieve.generate(ids, **greedy(max_new_tokens=5))
    store = result.cache.sieve_layers[0].store
    # Four sinks and seven recent tokens of the context, the last token, and four of the answer.
    text = torch.cat([ids[0, :4], ids[0, 32:], result.sequences[0, 40:44]])
    with torch.no_grad():
        wanted = DynamicCache()
        model(text[None], **{CACHE: wanted}, use_cache=True)
    torch.testing.assert_close(store.keys, wanted.layers[0].keys, atol=1e-5, rtol=1e-4)


def test_a_budget_that_covers_the_prompt_changes_nothing():
    model, ids = tiny_model(), tiny_prompt(1, 40)
    answers = []
    for plan in (kvsieve.plan("full"), kvsieve.plan("rerotation", base="knorm", budget=60, question_tokens=3)):
        with kvsieve.attach(model, plan) as sieve:
            answers.append(sieve.generate(ids, **GREEDY).sequences)
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    "base",
    [
        SnapKV(budget=20, window=4, kernel=3),
        CurDKV(budget=20),
        ChunkKV(base=SnapKV(budget=20, window=4, kernel=3), chunk_length=3),
    ],
    ids=lambda base: type(base).__name__,
)
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_padded_row_is_the_row_alone(base, chunk):
    ids, mask = padded_prompt(53, PADDING, seed=2)
    plan = Plan(evict=Rerotation(base=base, question_tokens=QUESTION, chunk=chunk))
    with kvsieve.attach(tiny_model(), plan) as sieve:
        both = sieve.generate(ids, mask, chunk=11, **GREEDY)
        alone = sieve.generate(ids[1:, PADDING:], **GREEDY)
    assert torch.equal(both.sequences[1, 53:], alone.sequences[0, 44:])
    assert both.stats.kv_entries == [20] * 4 and Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("chunk", [3, 8, 9])
def test_a_chunk_smaller_than_the_window_keeps_the_window(chunk):
    """The share of a short chunk has no room for it: entries go once there are more than the base always keeps."""
    ids = tiny_prompt(1, 45, seed=3)
    plan = Plan(evict=Rerotation(base=SnapKV(budget=20, window=8, kernel=3), question_tokens=QUESTION, chunk=chunk))
    with kvsieve.attach(tiny_model(), plan) as sieve:
        cache = sieve.prefill(ids)
        assert len(sieve.generate(ids, **GREEDY).sequences[0]) == 49
    assert cache.entries() == [20] * 4
    assert all({*range(32, 45)} <= set(head) for layer in stored(cache)[0] for head in layer)


def test_protected_tokens_stay():
    ids = tiny_prompt(1, 40)
    with kvsieve.attach(tiny_model(), kvsieve.plan("rerotation", base="knorm", budget=12)) as sieve:
        kept = sieve.prefill(ids, protect=[(10, 14)])
    assert kept.num_seen == 12


@pytest.mark.parametrize(
    "base",
    [
        SnapKV(budget=20, window=4, every=2),
        SnapKV(budget=20, window=4, skip_layers=1),
        SnapKV(budget=20, window=4, per_query_head=True),
        H2O(budget=20),
        AdaKV(),
        Compactor(budget=20),
        ExpectedAttention(budget=20),
        "snapkv",
    ],
    ids=lambda base: type(base).__name__,
)
def test_other_bases_are_refused(base):
    with pytest.raises(PlanError, match="Rerotation: base must"):
        Rerotation(base=base)


def test_bad_parameters_are_named():
    for given, match in (
        ({"question_tokens": 0}, "question_tokens"),
        ({"chunk": 0}, "chunk"),
        ({"question_tokens": 20}, "the question of 20 and the base's 1"),
    ):
        with pytest.raises(PlanError, match=match):
            Rerotation(base=KNorm(budget=20), **given)
