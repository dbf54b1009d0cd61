"""Rotary tables that depend on the length of the whole (longrope, dynamic NTK), and contexts that scaling stretches."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import Phi3ForCausalLM

import kvsieve
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.model.context import context_of
from kvsieve.hf.model.tables import RotaryTables
from small import fill, longrope_factors
from tiny import greedy, tiny_prompt
from tiny_models import build

BORDER = 40
LONGROPE = longrope_factors(BORDER)
LONG = {"max_position_embeddings": 160, "rope_parameters": LONGROPE}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
MODELS = {
    # Their generate drops the cache at the border.
    "phi3": lambda: build("phi3", dtype=torch.float64, original_max_position_embeddings=BORDER, **LONG),
    "phimoe": lambda: build(
        "phimoe",
        dtype=torch.float64,
        max_position_embeddings=160,
        original_max_position_embeddings=BORDER,
        rope_parameters={**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    ),
    "llama": lambda: build("llama", dtype=torch.float64, **LONG),
    "dynamic": lambda: build("llama", dtype=torch.float64, max_position_embeddings=BORDER, rope_parameters=DYNAMIC),
}
GREEDY = greedy()
LOGITS = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
FULL = kvsieve.plan("full")


# Before 5.20 transformers drops the cache at the border and reads one token.
reads_again = pytest.mark.skipif(
    "next_sequence_length" not in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation),
    reason="this release of transformers does not read the tokens of a cache again that it drops",
)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return fill(MODELS[request.param]())


@pytest.fixture(scope="module")
def phi3():
    return fill(MODELS["phi3"]())


def ids(count, rows=1, seed=5):
    return tiny_prompt(rows, count, seed=seed, low=3)


def own(model, prompt, **options):
    """What transformers answers on tables that no earlier call has left longer."""
    model.model.rotary_emb(torch.zeros(1, 1, 1), position_ids=torch.zeros(1, 1, dtype=torch.int64))
    return model.generate(prompt, **options)


def distance(one, other):
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


# Tokens of the prompt and of the answer: below the border, one token over it, over it, and an answer that crosses it.
SIZES = [(20, 8), (BORDER, 2), (BORDER + 1, 4), (60, 4), (30, 16)]


@reads_again
@pytest.mark.parametrize("chunk", [None, 16, BORDER - 1])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_and_a_later_turn_are_one_pass(model, size, chunk):
    prompt, new = ids(size[0]), size[1]
    wanted = own(model, prompt, max_new_tokens=new, **LOGITS)
    with kvsieve.attach(model, FULL) as sieve:
        first = sieve.generate(prompt, chunk=chunk, max_new_tokens=new, **LOGITS)
        assert first.cache.num_seen == size[0] + new - 1
        assert distance(first.output.logits, wanted.logits) < 1e-9
        talk = torch.cat([first.sequences, ids(25, seed=8)], 1)
        second = sieve.generate(talk, cache=first.cache, chunk=chunk, max_new_tokens=3, **LOGITS)
    assert torch.equal(first.sequences, wanted.sequences)
    assert distance(second.output.logits, own(model, talk, max_new_tokens=3, **LOGITS).logits) < 1e-9
    assert second.cache.num_seen == talk.shape[1] + 2


@reads_again
def test_what_was_read_again_and_what_was_not_is_told(phi3):
    with kvsieve.attach(phi3, FULL) as sieve:
        first = sieve.generate(ids(20), max_new_tokens=8, **GREEDY)
        crossing = sieve.generate(ids(30), max_new_tokens=16, **GREEDY)
        second = sieve.generate(torch.cat([first.sequences, ids(25)], 1), cache=first.cache, max_new_tokens=2, **GREEDY)
    assert first.stats.notes == []
    assert crossing.stats.notes[0].startswith("40 tokens were read again: the model's rotary tables depend on")
    assert second.stats.notes[0].startswith("27 tokens were read again")
    llama = MODELS["llama"]()
    with kvsieve.attach(llama, FULL) as sieve:
        notes = sieve.generate(ids(30), max_new_tokens=16, **GREEDY).stats.notes
    assert "read by those of 30 to 45 tokens, as transformers' generate reads an answer" in notes[0]


PLANS = {
    "snapkv": kvsieve.plan("snapkv", budget=16, window=4, paper=True),
    "fastkv": kvsieve.plan("fastkv", budget=16, window=4, tsp_layer=1, paper=True),
    "kvzip": kvsieve.plan("kvzip", budget=16, repeat_ids=(), go_on_ids=(), answer_ids=()),
    "kivi": kvsieve.plan("full", codec="kivi:bits=4"),
}


def test_a_cache_that_is_dropped_and_not_read_again_is_refused(phi3, monkeypatch):
    def dropping(input_ids, attention_mask=None, **kwargs):
        made = type(phi3).prepare_inputs_for_generation(phi3, input_ids, attention_mask=attention_mask, **kwargs)
        return {**made, "input_ids": input_ids[:, -1:], "position_ids": None} if input_ids.shape[1] > BORDER else made

    monkeypatch.setattr(phi3, "prepare_inputs_for_generation", dropping)
    with kvsieve.attach(phi3, FULL) as sieve, pytest.raises(UnsupportedOptionError, match=r"drops the cache at 40 tok"):
        sieve.generate(ids(30), max_new_tokens=16, **GREEDY)


@reads_again
@pytest.mark.parametrize("options", [{}, {"question_tokens": 5}, {"num_beams": 2}], ids=["", "question", "beams"])
@pytest.mark.parametrize("name", PLANS)
def test_an_answer_that_crosses_goes_on_as_from_a_prompt_of_all_so_far(phi3, name, options):
    prompt = ids(30)
    with kvsieve.attach(phi3, PLANS[name]) as sieve:
        found = sieve.generate(prompt, max_new_tokens=14, chunk=16, **options, **GREEDY)
        assert found.cache.num_seen == 43
        if "num_beams" not in options:
            more = {name: value + 11 for name, value in options.items()}
            so_far = found.sequences[:, :41]
            fresh = sieve.generate(so_far, torch.ones_like(so_far), max_new_tokens=3, **more, **GREEDY)
            assert torch.equal(found.sequences, fresh.sequences)
            assert found.stats.kv_entries == fresh.stats.kv_entries


@pytest.mark.parametrize("name", ["snapkv", "fastkv"])
def test_a_beginning_read_by_other_tables_is_read_again(phi3, name):
    prompt = ids(60)
    with kvsieve.attach(phi3, PLANS[name]) as sieve:
        wanted = sieve.generate(prompt, max_new_tokens=4, **GREEDY).sequences
        cache = sieve.begin(prompt[:, :30], chunk=16)
        found = sieve.generate(prompt, cache=cache, max_new_tokens=4, **GREEDY)
    assert torch.equal(found.sequences, wanted) and found.stats.notes[0].startswith("30 tokens were read again")


def test_a_saved_cache_knows_its_tables(phi3, tmp_path):
    with kvsieve.attach(phi3, FULL) as sieve:
        first = sieve.generate(ids(30), max_new_tokens=4, **GREEDY)
        sieve.save(first.cache, tmp_path / "cache")
        cache = sieve.load(tmp_path / "cache").cache
        talk = torch.cat([first.sequences, ids(20, seed=8)], 1)
        second = sieve.generate(talk, cache=cache, max_new_tokens=4, **GREEDY)
    assert torch.equal(second.sequences, own(phi3, talk, max_new_tokens=4, **GREEDY))


def test_guidance_is_another_prompt_and_gets_a_cache_of_its_own(phi3):
    options = {"guidance_scale": 1.5, "negative_prompt_ids": ids(35, seed=3), "max_new_tokens": 4, **LOGITS}
    wanted = own(phi3, ids(30), **options)
    with kvsieve.attach(phi3, FULL) as sieve:
        found = sieve.generate(ids(30), chunk=16, **options)
    assert distance(found.output.logits, wanted.logits) < 1e-9


def test_tables_are_left_as_they_were_found(model):
    own(model, ids(4), max_new_tokens=1, **GREEDY)
    before = model.model.rotary_emb.inv_freq.clone()
    with kvsieve.attach(model, FULL) as sieve:
        sieve.generate(ids(60), chunk=16, max_new_tokens=2, **GREEDY)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_tables_that_do_not_depend_on_the_length_are_left_alone():
    model = build("llama", max_position_embeddings=64, rope_parameters={**DYNAMIC, "rope_type": "linear"})
    tables = RotaryTables(model)
    assert not tables.depend and tables.same((10, 20), 200)
    with kvsieve.attach(model, FULL) as sieve:
        assert sieve.generate(ids(30), max_new_tokens=2, **GREEDY).cache.conversation.tables is None


def test_lengths_with_the_same_tables(phi3):
    tables = RotaryTables(phi3)
    assert tables.depend and tables.same(None, 50) and tables.same((10, 40), 40) and tables.same((41, 50), 160)
    assert not tables.same((10, 40), 41) and not tables.same((41, 41), 40) and not tables.same((40, 41), 41)


SCALED = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 256),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 256),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn of a shorter original": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    "yarn, length raised": ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
    "default": ({"rope_type": "default"}, 64),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_context_counts_the_scaling_of_positions(name):
    rope, context = SCALED[name]
    model = build("qwen2", dtype=torch.float64, max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})
    assert context_of(model.config) == context
    prompt = ids(context - 4)
    with kvsieve.attach(model, FULL) as sieve:
        found = sieve.generate(prompt, max_new_tokens=2, **GREEDY).sequences
        with pytest.raises(InputError, match=f"has {context + 1} tokens, the model's context ends at {context}"):
            sieve.generate(ids(context + 1), max_new_tokens=1, **GREEDY)
    assert torch.equal(found, own(model, prompt, max_new_tokens=2, **GREEDY))


def test_parameters_by_type_of_layer_stretch_only_from_an_original_length():
    config = build("llama").config
    config.rope_parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    assert context_of(config) == 512
    config.rope_parameters["full_attention"] |= {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert context_of(config) == 2048
