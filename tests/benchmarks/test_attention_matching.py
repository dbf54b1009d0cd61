"""The measurement of Attention Matching: what its settings are, and one context of a tiny model."""

from __future__ import annotations

import torch

import kvsieve
from benchmarks.answers.attention_matching import Context, plan_of, table
from tiny import tiny_model, tiny_prompt
from toy_words import word_tokenizer


def test_settings_are_steps_of_the_method_or_methods():
    tokenizer = word_tokenizer()
    steps = {name: plan_of(f"{name}@5%", tokenizer).evict for name in ("keys", "biases", "matching", "off-policy")}
    assert [(one.biases, one.values, one.on_policy) for one in steps.values()] == [
        (False, False, True),
        (True, False, True),
        (True, True, True),
        (True, True, False),
    ]
    assert plan_of("kvzip@25%", tokenizer).evict.budget.ratio == 0.25


def test_a_context_answers_several_questions_with_fewer_entries():
    model, ids = tiny_model(), tiny_prompt(1, 60)
    full, few = (
        Context(model, plan, ids[:, :50]) for plan in (kvsieve.plan("full"), plan_of("matching@20%", word_tokenizer()))
    )
    assert [layer.store.size for layer in few.cache.layers] == [10] * 4
    tokens = full.generate(ids[:, 50:], 5, set())
    answer = torch.tensor([tokens])
    assert full.logits(ids[:, 50:], answer).argmax(-1).tolist() == tokens
    assert torch.equal(few.logits(ids[:, 50:], answer), few.logits(ids[:, 50:], answer))
    assert few.generate(ids[:, 50:], 5, {*range(128)}) == few.generate(ids[:, 50:], 5, set())[:1]


def test_the_table_has_the_means_of_all_prompts():
    rows = [
        {"full": 1.0, "settings": {"matching@5%": {"kl": kl, "same": 0.5, "score": 1.0, "seconds": 2.0}}}
        for kl in (0.1, 0.3)
    ]
    assert "| matching@5% | 0.200 | 0.500 | 1.000 | 2.0 |" in table(rows, ["matching@5%", "kvzip@5%"])
