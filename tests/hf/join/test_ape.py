"""Documents at the same positions: against a definition with explicit hidden states."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvsieve
from kvsieve.errors import InputError, PlanError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.join.parallel import why_not_parallel
from kvsieve.methods.joins import Ape
from kvsieve.planning.joins import join_of
from kvsieve.store.rules import why_not
from tiny_models import build

BEFORE = 6
SIZES = (17, 23, 20)
TOTAL = BEFORE + sum(SIZES)
SHIFT = max(SIZES) - sum(SIZES)
TEMPERATURE = 0.7
SCALE = 0.8


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, TOTAL + 9), generator=torch.Generator().manual_seed(4))


def joined(sieve, ids, **options):
    before, *texts = ids[:, :TOTAL].split((BEFORE, *SIZES), 1)
    return sieve.join(texts, before, kind=Ape(temperature=TEMPERATURE, scale=SCALE), **options)


def by_definition(model, stored, ids):
    """Logits of the tokens after the documents, which are merged with other entries by their scaled log-sum-exp.

    stored: keys and values of the tokens up to the question, as they were alone, by layer.
    """
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
        groups = query.shape[1] // key.shape[1]
        pairs = zip(stored[index], (key, value), strict=True)
        keys, values = (torch.cat(pair, 2).repeat_interleave(groups, 1) for pair in pairs)
        logits = query @ keys.transpose(2, 3) * attention.scaling
        columns = torch.arange(ids.shape[1])
        logits[..., BEFORE:TOTAL] /= TEMPERATURE
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


def stored_alone(sieve, ids):
    """Keys and values of documents that were prefilled alone, at their own positions, by layer."""
    before, *texts = ids[:, :TOTAL].split((BEFORE, *SIZES), 1)
    caches = [sieve.prefill(torch.cat([before, text], 1), reduce=False) for text in texts]
    found = []
    for layers in zip(*(cache.all_layers for cache in caches), strict=True):
        keys = [layer.keys[:, :, BEFORE if number else 0 :] for number, layer in enumerate(layers)]
        values = [layer.values[:, :, BEFORE if number else 0 :] for number, layer in enumerate(layers)]
        found.append((torch.cat(keys, 2), torch.cat(values, 2)))
    return found


OPTIONS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("decode", ["eager", "fused"])
@pytest.mark.parametrize("chunk", [None, 4])
@torch.no_grad()
def test_the_answer_is_that_of_the_definition(model, ids, chunk, decode):
    with kvsieve.attach(model, kvsieve.plan("full"), decode=decode) as sieve:
        cache = joined(sieve, ids, chunk=chunk).cache
        stored = stored_alone(sieve, ids)
        answer = sieve.generate(ids, cache=cache.fork(), chunk=chunk, **OPTIONS)
        drafted = sieve.generate(ids, cache=cache.fork(), draft="lookup", **OPTIONS)
        plain = model.generate(ids, **{CACHE: cache.fork()}, **OPTIONS)
    expected = ids
    for _ in range(5):
        token = by_definition(model, stored, expected)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, token], 1)
    for found in (answer.sequences, drafted.sequences, plain):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_logits_are_those_of_the_definition(model, ids, tmp_path):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = joined(sieve, ids).cache
        wanted = by_definition(model, stored_alone(sieve, ids), ids)
        sieve.save(cache, tmp_path / "joined")
        for each in (cache.fork(), sieve.load(tmp_path / "joined").cache):
            sieve.prefill(ids[:, :-1], cache=each)
            found = sieve.feed(each, ids[:, -1:], None, logits=1).logits
            torch.testing.assert_close(found[:, 0], wanted[:, -1], atol=1e-9, rtol=1e-9)


def test_without_temperature_and_scale_it_is_plain_attention_over_them(model, ids):
    """A factor of one leaves the softmax over all entries."""
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        before, *texts = ids[:, :TOTAL].split((BEFORE, *SIZES), 1)
        cache = sieve.join(texts, before, kind="ape:temperature=1:scale=1").cache
        other = cache.fork()
        other.conversation.parallel = None
        logits = []
        for each in (cache, other):
            sieve.prefill(ids[:, :-1], cache=each)
            logits.append(sieve.feed(each, ids[:, -1:], None, logits=1).logits)
    torch.testing.assert_close(*logits, atol=1e-9, rtol=1e-9)


PLANS = {
    "snapkv": {"budget": 40, "window": 8},
    "adakv": {"budget": 40, "window": 8},
    "keydiff": {"budget": 12},
    "kivi": {"bits": 4, "block": 16, "tail": 8},
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_act_on_them(model, ids, plan):
    floor = {} if plan == "kivi" else {"floor": 0}
    with kvsieve.attach(model, kvsieve.plan(plan, **floor, **PLANS[plan])) as sieve:
        found = joined(sieve, ids)
        assert (found.reused, found.reread, found.cache.num_seen) == (TOTAL, 0, TOTAL)
        assert found.cache.conversation.approximate == (f"ape:temperature={TEMPERATURE}:scale={SCALE}",)
        result = sieve.generate(ids, cache=found.cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert result.sequences.shape[1] == ids.shape[1] + 4
        if plan in ("snapkv", "adakv"):
            assert max(result.cache.entries()) <= 40 + 4


def test_a_question_shorter_than_the_plans_window_is_refused(model, ids):
    with kvsieve.attach(model, kvsieve.plan("snapkv", floor=0, **PLANS["snapkv"])) as sieve:
        cache = joined(sieve, ids).cache
        with pytest.raises(InputError, match="looks back on the last 8, in one pass: ask at least 8 .*the join 'full'"):
            sieve.generate(ids[:, : TOTAL + 3], cache=cache, **OPTIONS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "quest", "budget": 24}, "attends to chosen entries"),
        ({"method": "rocketkv-mt", "budget": 32, "window": 8}, "attends to chosen entries"),
    ],
)
def test_plans_that_cannot_merge_are_refused(model, ids, plan, message):
    with (
        kvsieve.attach(model, kvsieve.plan(floor=0, **plan)) as sieve,
        pytest.raises(UnsupportedOptionError, match=message),
    ):
        joined(sieve, ids)


def test_plans_that_take_columns_for_positions_are_refused(model):
    with kvsieve.attach(model, kvsieve.plan("compactor", budget=24)) as sieve:
        assert "rotates keys by their columns" in why_not_parallel(sieve)


def test_tables_of_another_length_are_refused(ids):
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    with kvsieve.attach(build("llama", rope_parameters=scaled), kvsieve.plan("full")) as sieve:
        assert sieve.facts.tables.depend
        with pytest.raises(UnsupportedOptionError, match="tables depend on the length"):
            joined(sieve, ids)


@pytest.mark.parametrize("draft", ["lookup:ngram=1:adapt=false", "self:kivi", "self:snapkv:budget=20:window=4:floor=0"])
def test_answers_with_drafts_are_those_without(model, ids, draft):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        plain, drafted = (
            sieve.generate(ids, torch.ones_like(ids), cache=joined(sieve, ids).cache, draft=source, **options)
            for source in (None, draft)
        )
        assert torch.equal(plain.sequences, drafted.sequences)
        assert not any("draft failed" in note for note in drafted.stats.notes)


def test_readers_draft_nothing_on_them(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = joined(sieve, ids).cache
        with pytest.raises(UnsupportedOptionError, match="at the same positions, and a reader attends to chosen"):
            sieve.generate(ids, torch.ones_like(ids), cache=cache, draft="self:quest:budget=16", max_new_tokens=4)
        assert (cache.status, cache.num_seen) == ("ready", TOTAL)


def test_they_are_not_edited_or_stored(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        found = joined(sieve, ids)
        with pytest.raises(UnsupportedOptionError, match="at the same positions"):
            sieve.edit(found.cache, found.ids)
        assert why_not(sieve, found.cache) == "its documents are at the same positions"


@pytest.mark.parametrize("text", ["ape:temperature=0", "ape:scale=-1", "ape:scale=nan"])
def test_wrong_parameters(text):
    with pytest.raises(PlanError, match="number above 0|must be a number"):
        join_of(text)
