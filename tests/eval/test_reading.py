"""A document is read once, and every question about it gets what reading the whole prompt would have given."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.eval.reading import DocumentReader
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.shared import read_alone
from kvsieve.models.families import build
from small import plan_of, stored

FULL = kvsieve.plan("full")
QUESTIONS = (9, 40)


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.float64)


def tokens(size, seed):
    return torch.randint(2, 120, (1, size), generator=torch.Generator().manual_seed(seed))


def same(mine, cache, logits, name):
    assert stored(mine.cache) == stored(cache), name
    torch.testing.assert_close(mine.logits, logits, rtol=0, atol=1e-9, msg=name)
    assert mine.cache.turn.record == cache.turn.record, name


@pytest.mark.parametrize("name", kvsieve.list_methods())
def test_each_question_gets_what_reading_alone_gives(model, name):
    plan = plan_of(name, model).for_model(model)
    reader, plans = DocumentReader(model, None), [FULL, plan]
    for document in (tokens(83, 1), tokens(90, 2)):
        for size in QUESTIONS:
            question = tokens(size, size)
            for ids, state in (
                (torch.cat([document, question], 1), reader.after_prompt(plans, document, question, 8)[1]),
                (document, reader.after_context(plans, document, 8)[1]),
            ):
                cache, logits, fed = read_alone(model, plan, ids, torch.ones_like(ids), ReadOptions(None, 8))
                same(state, cache, logits, name)
                assert torch.equal(fed, state.fed) and torch.equal(ids, state.given)
