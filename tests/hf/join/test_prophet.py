"""Tokens of joined documents chosen by the question's attention: against a definition with explicit hidden states."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvsieve
from kvsieve.errors import InputError, PlanError, UnsupportedOptionError
from kvsieve.methods.joins import Prophet
from kvsieve.planning.joins import join_of
from tiny_models import build

BEFORE = 6
SIZES = (17, 23, 20)
START = BEFORE + SIZES[0]
TOTAL = BEFORE + sum(SIZES)
QUESTION = torch.tensor([[11, 12, 40, 13, 14]])


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, TOTAL), generator=torch.Generator().manual_seed(4))


def joined(sieve, ids, kind, question=QUESTION, **options):
    return sieve.join([*ids[:, BEFORE:].split(SIZES, 1)], ids[:, :BEFORE], kind=kind, question=question, **options)


def keys_and_values(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.sieve_layers.values()]


def passed(model, tokens, columns, stored):
    """Pass tokens of columns over stored entries: new entries of every layer, and mean attention of the columns."""
    decoder = model.model
    hidden = decoder.embed_tokens(tokens)
    size = max(TOTAL, int(columns.max()) + 1)
    entries, attention = [], []
    for layer, (old_keys, old_values) in zip(decoder.layers, stored, strict=True):
        own = layer.self_attn
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            project(normed).view(1, len(columns), -1, own.head_dim).transpose(1, 2)
            for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *decoder.rotary_emb(hidden, columns[None]))
        keys, values = (
            torch.nn.functional.pad(old, (0, 0, 0, size - old.shape[2])).clone() for old in (old_keys, old_values)
        )
        keys[:, :, columns], values[:, :, columns] = key, value
        entries.append((keys, values))
        groups = query.shape[1] // keys.shape[1]
        logits = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * own.scaling
        weights = logits.masked_fill(torch.arange(size) > columns[:, None], float("-inf")).softmax(-1)
        attention.append(weights.mean((0, 1, 2)))
        mixed = weights @ values.repeat_interleave(groups, 1)
        hidden = hidden + own.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return entries, torch.stack(attention)


@pytest.mark.parametrize("share", [0.1, 0.5])
@torch.no_grad()
def test_it_is_the_definition(model, ids, share):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        stored = keys_and_values(joined(sieve, ids, "modules").cache)
        _, attention = passed(model, QUESTION, torch.arange(TOTAL, TOTAL + QUESTION.shape[1]), stored)
        best = attention.sum(0)[START:TOTAL].topk(round(share * (TOTAL - START))).indices.sort().values + START
        expected, _ = passed(model, ids[:, best], best, stored)
        found = joined(sieve, ids, Prophet(share=share))
    assert found.reread == len(best) and found.reused == TOTAL - len(best)
    for index, (pair, other) in enumerate(zip(keys_and_values(found.cache), expected, strict=True)):
        torch.testing.assert_close(pair, other, atol=1e-9, rtol=1e-9, msg=lambda text, at=index: f"layer {at}: {text}")
    record = found.cache.conversation.edits
    assert record.reread == len(best) and record.share(TOTAL) == pytest.approx((TOTAL - START - len(best)) / TOTAL)


@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt_neox"])
def test_all_tokens_are_a_full_prefill(family, ids):
    with kvsieve.attach(build(family), kvsieve.plan("full")) as sieve:
        found = joined(sieve, ids, Prophet(share=1.0))
        whole = sieve.prefill(ids)
    for pair, other in zip(keys_and_values(found.cache), keys_and_values(whole), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


def test_chunks_are_the_whole(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        whole, parts = (joined(sieve, ids, Prophet(share=0.4), chunk=chunk) for chunk in (None, 7))
    for pair, other in zip(keys_and_values(whole.cache), keys_and_values(parts.cache), strict=True):
        torch.testing.assert_close(pair, other, atol=1e-9, rtol=1e-9)


def test_another_question_chooses_other_tokens(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        old, one, two = (
            keys_and_values(joined(sieve, ids, kind, question).cache)[-1][0]
            for kind, question in (("modules", None), ("prophet", QUESTION), ("prophet", [50, 60, 61]))
        )
    changed = [(keys != old).any(-1).any(1)[0] for keys in (one, two)]
    assert not torch.equal(*changed) and all(int(mask.sum()) == 9 for mask in changed)


def test_the_cache_is_without_the_question_and_continues(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = joined(sieve, ids, "prophet").cache
        conversation = cache.conversation
        assert conversation.num_seen == TOTAL and conversation.prompt_lengths == (TOTAL,)
        assert all(layer.store.index[0, 0].tolist() == list(range(TOTAL)) for layer in cache.all_layers)
        assert conversation.approximate == ("prophet:share=0.2",)
        result = sieve.generate(torch.cat([ids, QUESTION], 1), cache=cache, max_new_tokens=4, do_sample=False)
    assert result.sequences.shape[1] <= TOTAL + QUESTION.shape[1] + 4


@pytest.mark.parametrize("plan", [{"method": "snapkv", "budget": 30, "window": 8}, {"method": "quest", "budget": 24}])
def test_plans_act_on_the_question(model, ids, plan):
    with kvsieve.attach(model, kvsieve.plan(floor=0, **plan)) as sieve:
        found = joined(sieve, ids, "prophet")
        seen = TOTAL - (8 if plan["method"] == "snapkv" else 0)
        assert found.cache.conversation.num_seen == seen and found.reread == round(0.2 * (seen - START))
        more = torch.cat([found.ids, QUESTION], 1)
        result = sieve.generate(more, cache=found.cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert result.sequences.shape[1] == more.shape[1] + 4


def test_one_document_is_a_plain_prefill(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        found = sieve.join([ids], kind="prophet", question=QUESTION)
        whole = sieve.prefill(ids)
    assert found.reread == 0 and not found.cache.conversation.approximate
    for pair, other in zip(keys_and_values(found.cache), keys_and_values(whole), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


@pytest.mark.parametrize(
    ("plan", "question", "message"),
    [
        ({"method": "full"}, None, "chooses tokens by the question; give its token ids"),
        ({"method": "full"}, [], "question is the token ids of one text"),
        ({"method": "full"}, [1 << 20], "the model knows 0 to"),
        (
            {"method": "full"},
            [7] * 447,
            "have 66 tokens together and the question 447, the model's context ends at 512",
        ),
        ({"method": "keydiff", "budget": 24, "floor": 0}, QUESTION, "evicts entries of each document alone"),
    ],
)
def test_reasons_against_it(model, ids, plan, question, message):
    with (
        kvsieve.attach(model, kvsieve.plan(**plan)) as sieve,
        pytest.raises((InputError, UnsupportedOptionError), match=message),
    ):
        joined(sieve, ids, "prophet", question)


@pytest.mark.parametrize("share", ["200", "0", "x"])
def test_wrong_shares(share):
    with pytest.raises(PlanError, match="Prophet: share must be a share"):
        join_of(f"prophet:share={share}")
