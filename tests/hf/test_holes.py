"""Masks that hide tokens between others: a prompt is then the one without them, in one pass and in chunks."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, UnsupportedOptionError
from small import plan_of
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build

N, NEW = 90, 3
GREEDY = greedy(max_new_tokens=NEW)
HIDDEN = [3, 20, 21, 22, 23, 24, 25, 26, 40, 60, 74, 80, 83, 84, 88]
PLANS = {
    **{name: {} for name in kvsieve.list_methods()},
    "keydiff, chunks": {"chunks": True},
    "lagkv, chunks": {"chunks": True, "lag": 8, "sinks": 2},
    "snapkv, every": {"every": 3},
    "snapkv, codec": {"codec": "kivi:bits=8:block=8:tail=4"},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(filled=True)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(3, N, seed=5, low=3, high=100)


def hole(row=0, hidden=HIDDEN):
    mask = torch.ones(1, N, dtype=torch.long)
    mask[0, [max(column - row, 1) for column in hidden]] = 0
    return mask


def plan(model, name):
    return plan_of(name.partition(",")[0], model, **PLANS[name])


def answer(sieve, ids, mask=None, **options):
    result = sieve.generate(ids, mask, **options, **GREEDY)
    assert torch.equal(result.sequences[:, : ids.shape[1]], ids)
    return result.sequences[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("name", PLANS)
def test_hidden_tokens_are_tokens_left_out(model, ids, name, chunk):
    with kvsieve.attach(model, plan(model, name)) as sieve:
        mask, one = hole(), ids[:1]
        bare = one[mask.bool()][None]
        wanted = answer(sieve, bare, chunk=chunk)
        assert answer(sieve, one, mask, chunk=chunk) == wanted
        # Beside rows that hide other tokens, and are padded.
        rows = torch.cat([hole(), hole(5), torch.cat([torch.zeros(1, 30), torch.ones(1, N - 30)], 1).long()])
        exact = sieve.plan.prefill is not None or (sieve.plan.evict is not None and sieve.plan.evict.when.chunks)
        if chunk and exact:
            with pytest.raises(UnsupportedOptionError, match="one row at a time"):
                sieve.generate(ids, rows, chunk=chunk, **GREEDY)
        elif sieve.plan.codec is None or sieve.plan.evict is not None or not chunk:
            assert answer(sieve, ids, rows, chunk=chunk)[0] == wanted[0]


@pytest.mark.parametrize("name", ["snapkv", "h2o", "fastkv", "keydiff, chunks", "quest"])
def test_holes_of_a_later_turn(model, ids, name):
    with kvsieve.attach(model, plan(model, name)) as sieve:
        seen, mask = ids[:1, :50], hole()
        mask[:, :50] = 1
        found = answer(sieve, ids[:1], mask, cache=sieve.prefill(seen))
        bare = ids[:1][mask.bool()][None]
        assert found == answer(sieve, bare, cache=sieve.prefill(seen))


@pytest.mark.parametrize("method", ["full", "snapkv", "expectedattention", "fastkv"])
def test_plain_calls(model, ids, method):
    """Hidden states come back in the order that was fed, and generate counts positions by the mask."""
    mask, one = hole(), ids[:1]
    bare = one[mask.bool()][None]
    with kvsieve.attach(model, plan_of(method, model)), torch.no_grad():
        found, wanted = model.generate(one, attention_mask=mask, **GREEDY), model.generate(bare, **GREEDY)
        assert found[0, N:].tolist() == wanted[0, bare.shape[1] :].tolist()
        if method == "full":
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            out = model(one, attention_mask=mask, position_ids=positions, output_hidden_states=True)
            plain = model(bare, output_hidden_states=True)
            torch.testing.assert_close(out.logits[mask.bool()], plain.logits[0])
            for ours, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
                torch.testing.assert_close(ours[mask.bool()], theirs[0])


@pytest.mark.parametrize("family", ["mistral:sliding", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3"])
def test_families(family):
    model = build(family, dtype=torch.float64)
    ids, mask = tiny_prompt(1, N, seed=5, low=3, high=100), hole()
    bare = ids[mask.bool()][None]
    with kvsieve.attach(model, kvsieve.plan("full" if "sliding" in family else "knorm")) as sieve:
        for chunk in (None, 16):
            assert answer(sieve, ids, mask, chunk=chunk) == answer(sieve, bare, chunk=chunk)


def test_a_question_is_counted_in_tokens(model, ids):
    mask, one = hole(), ids[:1]
    bare = one[mask.bool()][None]
    with kvsieve.attach(model, plan(model, "snapkv")) as sieve:
        assert answer(sieve, one, mask, question_tokens=8) == answer(sieve, bare, question_tokens=8)
        rows = torch.cat([hole(), hole(5)])
        with pytest.raises(InputError, match="question_tokens=8 are the last"):
            sieve.generate(ids[:2], rows, question_tokens=8, **GREEDY)


def test_what_is_protected_is_counted_in_tokens(model, ids):
    mask, one = hole(), ids[:1]
    bare = one[mask.bool()][None]
    with kvsieve.attach(model, plan(model, "snapkv")) as sieve:
        for chunk in (None, 16):
            options = {"protect": [(15, 30)], "chunk": chunk}
            assert answer(sieve, one, mask, **options) == answer(sieve, bare, **options)


def test_recurrent_layers_cannot_skip_tokens():
    model = build("qwen3_next", dtype=torch.float64)
    ids = tiny_prompt(1, N, seed=5, low=3, high=100)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, pytest.raises(InputError, match="cannot skip"):
        sieve.generate(ids, hole(), **GREEDY)
