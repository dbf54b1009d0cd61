"""Chosen tokens of joined documents prefilled over stored entries: against a definition with explicit hidden states."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvsieve
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.attach import attached
from kvsieve.hf.edit.moved import MovedEntries
from kvsieve.hf.join.blend import prefill_chosen
from kvsieve.methods.joins import Blend
from kvsieve.planning.joins import join_of
from tiny_models import build

BEFORE = 6
SIZES = (17, 23, 20)
START = BEFORE + SIZES[0]
TOTAL = BEFORE + sum(SIZES)


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, TOTAL), generator=torch.Generator().manual_seed(4))


def documents(ids):
    """Tokens before the documents, and each document's."""
    return ids[:, :BEFORE], ids[:, BEFORE:].split(SIZES, 1)


def stored_alone(sieve, ids):
    """Keys and values of documents that were prefilled alone, at their columns, by layer."""
    cache = sieve.join([*documents(ids)[1]], documents(ids)[0], kind="modules").cache
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.all_layers]


def blended(sieve, ids, join, chunk=None):
    before, texts = documents(ids)
    return sieve.join([*texts], before, kind=join, chunk=chunk)


def keys_and_values(cache):
    return [(layer.keys, layer.values) for layer in cache.sieve_layers.values()]


def by_definition(model, ids, stored, join):
    """Keys and values of every layer: hidden states of the travelling tokens, one explicit mask per layer."""
    decoder = model.model
    layers = len(decoder.layers)
    columns = torch.arange(START, TOTAL)
    hidden = decoder.embed_tokens(ids[:, START:])
    out = []
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        shape = (1, len(columns), -1, attention.head_dim)
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            project(normed).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *decoder.rotary_emb(hidden, columns[None]))
        old_keys, old_values = stored[index]
        keys, values = old_keys.clone(), old_values.clone()
        keys[:, :, columns], values[:, :, columns] = key, value
        out.append((keys, values))
        groups = query.shape[1] // keys.shape[1]
        logits = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * attention.scaling
        logits = logits.masked_fill(torch.arange(TOTAL) > columns[:, None], float("-inf"))
        mixed = logits.softmax(-1) @ values.repeat_interleave(groups, 1)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if join.source(layers) <= index < layers - 1:
            change = (keys - old_keys).square().sum((0, 1, 3)) + (values - old_values).square().sum((0, 1, 3))
            count = join.tokens(index, layers, TOTAL - START)
            best = change[columns].topk(count).indices.sort().values
            hidden, columns = hidden[:, best], columns[best]
    return out, columns


JOINS = {
    "15%": Blend(share="15%"),
    "half, a layer later": Blend(share=0.5, layer=2),
    "fewer in every layer": Blend(share=0.4, first=0.6),
}


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("name", JOINS)
@torch.no_grad()
def test_it_is_the_definition(model, ids, name, chunk):
    join = JOINS[name]
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        joined = blended(sieve, ids, join, chunk)
        expected, columns = by_definition(model, ids, stored_alone(sieve, ids), join)
    assert joined.reread == len(columns) < TOTAL - START
    assert joined.reused == TOTAL - joined.reread
    for index, (pair, other) in enumerate(zip(keys_and_values(joined.cache), expected, strict=True)):
        torch.testing.assert_close(pair, other, atol=1e-9, rtol=1e-9, msg=lambda text, at=index: f"layer {at}: {text}")


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "phi3", "gpt_neox", "stablelm"])
def test_nearly_all_tokens_are_nearly_a_full_prefill(family, ids, chunk):
    """All but one token, that of the least deviation: the entries of all the others are exact up to its layer."""
    with kvsieve.attach(build(family), kvsieve.plan("full")) as sieve:
        joined = blended(sieve, ids, Blend(share=0.98), chunk)
        whole = sieve.prefill(ids)
    assert joined.reread == TOTAL - START - 1
    for index, (pair, other) in enumerate(zip(keys_and_values(joined.cache), keys_and_values(whole), strict=True)):
        if index < 2:
            torch.testing.assert_close(pair, other, atol=1e-5, rtol=1e-4)
        changed = [(part - wanted).abs().amax((0, 1, 3)) > 1e-3 for part, wanted in zip(pair, other, strict=True)]
        assert all(int(part[:START].sum()) == 0 for part in changed)


def test_all_tokens_are_a_full_prefill(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        joined = blended(sieve, ids, Blend(share=1.0))
        whole = sieve.prefill(ids)
    for pair, other in zip(keys_and_values(joined.cache), keys_and_values(whole), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


def test_all_tokens_of_a_blended_pass_are_a_full_prefill(model, ids):
    """In the pass itself, which `Joining` leaves to a plain prefill."""
    join = Blend(share=1.0)
    before, texts = documents(ids)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        stored = sieve.join([*texts], before, kind="modules").cache
        entries = MovedEntries.of(sieve, [(stored, torch.arange(TOTAL))], torch.zeros(TOTAL, dtype=torch.bool))
        cache = sieve.new_cache()
        feed = functools.partial(prefill_chosen, sieve, cache, ids, entries.layers, join, None)
        entries.prefill(sieve, cache, ids[0], [(START, TOTAL)], feed=feed)
        entries.finish(sieve, cache, TOTAL)
        whole = sieve.prefill(ids)
    for pair, other in zip(keys_and_values(cache), keys_and_values(whole), strict=True):
        torch.testing.assert_close(pair, other, atol=1e-9, rtol=1e-9)


def test_entries_of_tokens_not_chosen_stay_and_the_conversation_continues(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        old, _ = stored_alone(sieve, ids)[3]
        joined = blended(sieve, ids, Blend(share=0.2))
        changed = (joined.cache.all_layers[3].keys != old).any(-1).any(1)[0].nonzero()[:, 0]
        assert joined.reread == 9 and len(changed) <= 9 and int(changed.min()) >= START
        for layer in joined.cache.all_layers:
            assert layer.store.index[0, 0].tolist() == list(range(TOTAL))
        conversation = joined.cache.conversation
        assert conversation.num_seen == TOTAL and not conversation.propagated and not conversation.turn.reading
        assert conversation.prompt_lengths == (TOTAL,)
        assert conversation.approximate == ("blend:share=0.2:layer=1",)
        more = torch.cat([ids, torch.tensor([[5, 6, 7]])], 1)
        found = sieve.prefill(more, cache=joined.cache)
        assert found.num_seen == TOTAL + 3


@pytest.mark.parametrize("plan", [{"method": "snapkv", "budget": 30, "window": 8}, {"method": "quest", "budget": 24}])
def test_plans_act_on_the_question(model, ids, plan):
    with kvsieve.attach(model, kvsieve.plan(floor=0, **plan)) as sieve:
        joined = blended(sieve, ids, Blend(share=0.2))
        conversation = joined.cache.conversation
        assert conversation.num_seen == TOTAL - (8 if plan["method"] == "snapkv" else 0)
        # The first document was a prompt of its own.
        assert not conversation.propagated and len(conversation.acted) == (3 if plan["method"] == "quest" else 0)
        more = torch.cat([joined.ids, torch.tensor([[5, 6, 7]])], 1)
        result = sieve.generate(more, cache=joined.cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert result.sequences.shape[1] == TOTAL + 7


def test_encoded_documents_are_encoded_again(model, ids):
    with kvsieve.attach(model, kvsieve.plan("kivi", bits=4, block=16, tail=8)) as sieve:
        joined = blended(sieve, ids, Blend(share=0.2))
        assert all(layer.store.is_encoded for layer in joined.cache.all_layers)


def test_nearer_to_a_full_prefill_with_more_tokens(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        whole = sieve.prefill(ids).all_layers[-1].values
        far = [
            float((blended(sieve, ids, Blend(share=share)).cache.all_layers[-1].values - whole).norm())
            for share in (0.1, 0.5, 1.0)
        ]
    assert far[0] > far[1] > far[2]


def test_no_hooks_stay(model, ids):
    def hooks():
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())

    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        before = hooks()
        blended(sieve, ids, Blend(share=0.2))
        assert hooks() == before


def test_another_plan_of_an_attached_model(model, ids):
    """A server's model has hooks for every plan."""
    with attached(model, kvsieve.plan("full"), any_plan=True) as sieve:
        found = blended(sieve, ids, Blend(share=0.2))
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        alone = blended(sieve, ids, Blend(share=0.2))
    for pair, other in zip(keys_and_values(found.cache), keys_and_values(alone.cache), strict=True):
        torch.testing.assert_close(pair, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("plan", "join", "message"),
    [
        ({"method": "full"}, Blend(layer=3), r"layer=3 leaves no deeper layer .* one of 1\.\.2"),
        ({"method": "keydiff", "budget": 24, "floor": 0}, Blend(), "evicts entries of each document alone"),
        ({"method": "fastkv", "budget": 40, "tsp_layer": 1, "floor": 0}, Blend(), "drops tokens between layers"),
    ],
)
def test_reasons_against_it(model, ids, plan, join, message):
    with (
        kvsieve.attach(model, kvsieve.plan(**plan)) as sieve,
        pytest.raises((UnsupportedOptionError, PlanError), match=message),
    ):
        blended(sieve, ids, join)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blend:share=200", "must be a share"),
        ("blend:share=0", "share"),
        ("blend:layer=0", "at least 1"),
        ("blend:share=10%:first=30%", r"outside \[share, 2 \* share\)"),
    ],
)
def test_wrong_parameters(text, message):
    with pytest.raises(PlanError, match=message):
        join_of(text)


def test_shares_fall_to_their_mean():
    assert join_of("blend:share=15%").spec == "blend:share=0.15:layer=1"
    join = Blend(share=0.2, first=0.3)
    counts = [join.tokens(layer, 12, 1000) for layer in range(1, 11)]
    assert counts[0] == 300 and counts[-1] == 100 and sum(counts) == 2000
    assert counts == sorted(counts, reverse=True)
    assert [Blend(share=0.2).tokens(layer, 12, 1000) for layer in range(1, 11)] == [200] * 10


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("share", ["20%", "60%"])
def test_the_record_counts_tokens_that_were_chosen(ids, share, chunk):
    model = build("llama").float().eval()
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        joined = blended(sieve, ids, join_of(f"blend:share={share}"), chunk)
        record = joined.cache.conversation.edits
        assert record.reread == joined.reread > 0
        assert record.reused == joined.reused
        assert record.share(TOTAL) == pytest.approx((TOTAL - START - record.reread) / TOTAL)
