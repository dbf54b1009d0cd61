"""FastGen: policies of heads by hand, and on a model."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import FastGen
from kvsieve.methods.fastgen import punctuation_of
from layers import context
from scored import columns, kept_slots, moved
from tiny import padded_prompt, tiny_model, tiny_prompt
from toy_words import word_tokenizer

F64 = torch.float64
IDS = {"special_ids": (1,), "punctuation_ids": (2,)}


def layer(*heads):
    """A layer whose last query gives these weights to its entries, per head; tokens 1 9 2 9 9 9."""
    keys = torch.tensor(heads, dtype=F64).log()[None, :, :, None]
    ctx = context(torch.ones(1, len(heads), 6, 1, dtype=F64), keys, scale=1.0)
    ctx.ids = torch.tensor([[1, 9, 2, 9, 9, 9]])
    return ctx


def test_policies_by_hand():
    heads = [
        [0.95, 0.01, 0.01, 0.01, 0.01, 0.01],  # special tokens
        [0.5, 0.02, 0.42, 0.02, 0.02, 0.02],  # and punctuation
        [0.3, 0.6, 0.01, 0.03, 0.03, 0.03],  # and the most attended one, 1
        [0.2, 0.02, 0.02, 0.4, 0.04, 0.32],  # and the most recent one
        [0.1, 0.2, 0.1, 0.3, 0.2, 0.1],  # everything
    ]
    ctx = layer(*heads)
    found = kept_slots(FastGen(budget=1, recovery=0.9, window=1, **IDS).select(ctx, (1,)))
    assert found == [[0], [0, 2], [0, 1, 2], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]]
    assert ctx.state["policy"].tolist() == [[0, 1, 2, 3, 4]]
    # A lower share takes cheaper policies.
    found = kept_slots(FastGen(budget=1, recovery=0.45, window=1, **IDS).select(layer(*heads), (1,)))
    assert found == [[0], [0], [0, 1, 2], [0, 2, 3], [0, 2, 3]]


def test_protected_entries_stay():
    ctx = layer([0.95, 0.01, 0.01, 0.01, 0.01, 0.01])
    ctx.protected = torch.tensor([[[False, False, False, False, True, False]]])
    assert kept_slots(FastGen(budget=1, recovery=0.9, window=1, **IDS).select(ctx, (1,))) == [[0, 4]]


def test_the_queries_of_a_group_are_averaged():
    keys = torch.zeros(1, 1, 4, 1, dtype=F64)
    keys[0, 0, 0] = 50.0
    query = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]], dtype=F64).view(1, 2, 4, 1)
    scores = FastGen(budget=1, window=2, **IDS).scores(context(query, keys, scale=1.0))
    # One head gives all to entry 0; the other a third and a quarter.
    assert scores[0, 0].tolist() == pytest.approx([(1 + 1 + 1 / 3 + 1 / 4) / 4, 7 / 48, 7 / 48, 1 / 16])


def test_padded_rows_chunks_and_later_turns():
    ids, mask = padded_prompt(50, 9)
    plan = kvsieve.plan(
        "fastgen", budget="20%", recovery=0.5, window=4, special_ids=(2, 3, 4), punctuation_ids=(7, 8, 9, 10)
    )
    with kvsieve.attach(tiny_model(), plan) as sieve:
        together = sieve.prefill(ids, mask)
        alone = sieve.prefill(ids[1:, 9:])
        parts = sieve.prefill(ids, mask, chunk=7)
    assert columns(together, 1) == columns(parts, 1) == moved(columns(alone), 9)
    assert len({len(head) for layer in columns(alone) for head in layer}) > 1


def test_heads_keep_their_policy_while_decoding():
    ids = tiny_prompt(size=50)
    plan = kvsieve.plan("fastgen", budget=8, recovery=0.5, window=4, every=4, special_ids=(2,), punctuation_ids=(7,))
    with kvsieve.attach(tiny_model(), plan) as sieve:
        result = sieve.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    for layer in result.cache.sieve_layers.values():
        policy = layer.state["policy"][0].tolist()
        store = layer.store
        lengths = store.valid.sum(-1)[0].tolist() if store.is_ragged else [store.size] * 2
        for one, length in zip(policy, lengths, strict=True):
            # Special tokens, marks, 8 most attended and 8 recent ones at most.
            assert length == 58 if one == 4 else length <= 16 + 8


def test_ids_come_from_a_tokenizer():
    tokenizer = word_tokenizer()
    evictor = kvsieve.plan("fastgen").evict
    assert evictor.lacks_tokenizer
    filled = evictor.for_tokenizer(tokenizer)
    assert not filled.lacks_tokenizer
    assert set(filled.special_ids) == set(tokenizer.all_special_ids)
    assert FastGen(budget=4, **IDS).for_tokenizer(tokenizer).special_ids == (1,)
    with kvsieve.attach(tiny_model(), kvsieve.plan("fastgen")) as sieve, pytest.raises(PlanError, match="tokenizer"):
        sieve.prefill(tiny_prompt())


def test_punctuation_is_single_marks():
    class Tokens:
        all_special_ids = (0,)

        def get_vocab(self):
            return {"!": 0, ".": 1, "\u0120,": 2, "\u2581?": 3, "...": 4, "a.": 5, "\u0120": 6, " ;": 7}

    assert punctuation_of(Tokens()) == (1, 2, 3, 7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recovery": 0.0}, "recovery must be a share above 0 and at most 1, got 0.0"),
        ({"window": 0}, "window must be a whole number of at least 1"),
        ({"special_ids": (-1,)}, "special_ids must be token ids"),
        ({"punctuation_ids": "12"}, "punctuation_ids must be token ids"),
    ],
)
def test_wrong_parameters_are_refused(options, said):
    with pytest.raises(PlanError, match=said):
        kvsieve.plan("fastgen", **options)
