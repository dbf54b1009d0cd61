"""benchmarks/speed/speculation.py with its documents, and benchmarks/answers/identical_drafts.py."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import kvsieve
from benchmarks.answers import identical_drafts
from benchmarks.speed import copying, speculation


class FourCharacters:
    """A tokenizer whose tokens are four characters each."""

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=[text[at : at + 4] for at in range(0, len(text), 4)])

    def decode(self, ids):
        return "".join(ids)


@pytest.mark.parametrize("kind", copying.TASKS)
def test_documents_are_long_and_have_what_their_questions_ask_for(kind):
    tokenizer = FourCharacters()
    first, second = copying.documents(kind, tokenizer, 4000, 2)
    assert first != second
    for document in (first, second):
        assert 3700 < copying.count(tokenizer, document.text) + copying.ROOM <= 4020
        assert set(document.questions) == set(copying.TASKS[kind])
        assert all(len(set(each)) == copying.QUESTIONS for each in document.questions.values())
        for question in document.questions.get("edit", ()):
            name, parameter = re.findall(r"`(\w+)`", question)[:2]
            assert re.search(rf"def {name}\([^)]*\b{parameter}\b", document.text)
        for question in document.questions.get("quote", ()):
            start = question.split('"')[1]
            assert " ".join(document.text.split()).count(start) == 1
        for question in document.questions.get("table", ()):
            start, end = map(int, re.findall(r"\d{4}", question))
            assert end == start + 2 and f"| {start} |" in document.text and f"| {end} |" in document.text


def test_summaries_are_medians_of_ratios_within_a_sample():
    def sample(number, seconds, drafted):
        runs = {
            "none": {"tokens": 101, "s": seconds},
            "lookup": {"tokens": 101, "s": drafted, "passes": 50, "drafted": 100, "accepted": 50, "same": True},
        }
        return {"plan": "full", "length": 4096, "task": "edit", "sample": number, "runs": runs}

    samples = [sample(0, 4.0, 1.0), sample(1, 20.0, 10.0), sample(2, 3.0, 1.0)]
    # An answer of one token has no rate.
    samples.append({**sample(3, 1.0, 1.0), "runs": {"none": {"tokens": 1, "s": 0}, "lookup": {"tokens": 1, "s": 0}}})
    (row,) = speculation.summary(samples)
    assert (row["samples"], row["ratio"], row["least"], row["same"]) == (3, 3.0, 2.0, 3)
    assert (row["tokens_per_pass"], row["accepted"], row["tokens_per_s"]) == (2.0, 0.5, 100.0)


def test_answers_with_drafts_are_compared_token_by_token():
    model = identical_drafts.circling("llama")
    prompts = identical_drafts.tiny_prompts(1)
    row = identical_drafts.compared(model, "snapkv:budget=25%:window=16", prompts, "lookup:adapt=false")
    assert row["tokens"] == identical_drafts.NEW_TOKENS and row["drafted"] > row["accepted"] > 0
    assert row["differences"] == []
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        ((plain,), _) = identical_drafts.answers(sieve, prompts[:1], None)
        other = [*plain[:5], (plain[5] + 1) % 128, *plain[6:]]
        found = identical_drafts.difference(sieve, prompts[0], plain, other)
    assert found["position"] == 5 and found["logits_apart"] > 0
    assert identical_drafts.why_not({**row, "differences": [found]}) == "1 answers differ"
    assert identical_drafts.why_not({**row, "accepted": 0}) is not None


def test_prompts_share_their_document():
    prompts = [torch.arange(500).tolist() + [number] * 200 for number in (1, 2)]
    assert speculation.shared(prompts) == 500
    assert speculation.shared([prompts[0], prompts[0]]) == 700 - speculation.LAST
