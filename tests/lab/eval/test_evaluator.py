"""The evaluator gives, for many plans at once, what each plan gives alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvsieve
from kvsieve.decoding import loop
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.drafts import draft_passes, length, opened
from kvsieve.hf.runtime import AttachedModel
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.outcome import compared_places
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.shared.prompt import next_logits
from small import fill, longrope_factors
from tiny_models import build
from toy_words import WORDS, word_tokenizer

PLANS = [
    kvsieve.plan("full"),
    kvsieve.plan("snapkv", budget="30%", window=4, kernel=3),
    kvsieve.plan("knorm", budget="30%"),
    kvsieve.plan("streamingllm", budget="60%"),
    kvsieve.plan("fastkv", budget="30%", tsp_layer=0, tsp_rate=0.5, window=6, kernel=3),
]
CONTEXT = " ".join(WORDS[3 + (7 * i) % 110] for i in range(70))


def exact(answer, expected):
    return {"score": float(answer == expected[0])}


def turn(*words: int) -> QuestionAnswer:
    return QuestionAnswer(" ".join(f"w{word}" for word in words), ("w1",), exact, 8)


@pytest.fixture(scope="module")
def evaluator(model):
    return Evaluator(model, word_tokenizer())


def by_itself(model, evaluator, plan, prompt, more=(), limit=8):
    """Greedy text of a conversation under a plan; `more`: what follows the prompt, after which nothing is dropped."""
    with kvsieve.attach(model, plan) as sieve:
        if not more:
            out = sieve.generate(prompt, torch.ones_like(prompt), max_new_tokens=limit, do_sample=False)
            return evaluator.prompter.answer(out.sequences[0, prompt.shape[1] :].tolist())[0]
        cache = sieve.prefill(prompt, torch.ones_like(prompt))
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        whole = prompt
        sieve.adopt(cache)
        for each in more:
            whole = torch.cat([whole, each], 1)
            logits = next_logits(sieve, cache, whole)[:, -1]
        tokens = []
        for _ in range(limit):
            tokens.append(int(logits.argmax(-1)))
            if tokens[-1] in evaluator.prompter.stops:
                break
            step = torch.tensor([[tokens[-1]]])
            logits = model(input_ids=step, **{CACHE: cache}, use_cache=True).logits[:, -1]
    return evaluator.prompter.answer(tokens)[0]


@pytest.mark.parametrize("kind", [{"num_beams": 2}, {"do_sample": True}], ids=str)
def test_several_answers_that_a_checkpoint_asks_for_are_refused(kind):
    model = build("llama", dtype=torch.float64)
    model.generation_config.update(**kind, num_return_sequences=2)
    with pytest.raises(UnsupportedOptionError, match=r"model\.generation_config\.num_"):
        Evaluator(model, word_tokenizer()).run(Sample(CONTEXT, (turn(5, 6, 7),)), PLANS[:1], "visible")


def test_visible_is_generate_under_the_plan(model, evaluator):
    sample = Sample(CONTEXT, (turn(5, 6, 7),))
    prompt = evaluator.prompter.encode(sample).prompt
    outcomes = evaluator.run(sample, PLANS, "visible")
    for plan, outcome in zip(PLANS, outcomes, strict=True):
        assert outcome.answers == [by_itself(model, evaluator, plan, prompt)], plan.name
        assert outcome.applied
    assert len({outcome.answers[0] for outcome in outcomes}) > 1, "the plans should not all agree on a random model"


def test_hidden_reduces_the_context_and_keeps_the_question(model, evaluator):
    sample = Sample(CONTEXT, (turn(5, 6, 7),))
    encoded = evaluator.prompter.encode(sample)
    outcomes = evaluator.run(sample, PLANS, "hidden")
    for plan, outcome in zip(PLANS, outcomes, strict=True):
        assert outcome.answers == [by_itself(model, evaluator, plan, encoded.context, [encoded.question])], plan.name
        assert outcome.record.prompt_tokens == encoded.context.shape[1]
    assert outcomes[1].record.kept[0] == int(0.3 * encoded.context.shape[1])


def test_distances_are_zero_for_full_and_positive_for_the_others(evaluator):
    for question in ("visible", "hidden"):
        full, *others = evaluator.run(Sample(CONTEXT, (turn(5, 6, 7),)), PLANS, question)
        assert (full.kl, full.kl_last, full.top1) == (0.0, 0.0, 1.0)
        assert all(each.kl > 0 and each.top1 <= 1 for each in others)
        # Eviction at the end of a prompt leaves its last token's logits as they were, propagation does not.
        assert [each.kl_last > 1e-9 for each in others] == [question == "hidden"] * 3 + [True]


def test_a_conversation_goes_on_with_the_right_answers(model, evaluator):
    sample = Sample(CONTEXT, (turn(5, 6), turn(8, 9), turn(10, 11)))
    encoded = evaluator.prompter.encode(sample)
    hidden = evaluator.run(sample, PLANS, "hidden")
    for plan, outcome in zip(PLANS, hidden, strict=True):
        for last in range(3):
            more = [encoded.question, *encoded.followups[:last]]
            assert outcome.answers[last] == by_itself(model, evaluator, plan, encoded.context, more), (plan.name, last)
    assert {"turn_1", "turn_2", "turn_3"} <= hidden[0].metrics.keys()
    visible = evaluator.run(sample, PLANS, "visible")
    full_whole = torch.cat([encoded.prompt, *encoded.followups], 1)
    assert visible[0].answers[2] == by_itself(model, evaluator, PLANS[0], full_whole)
    # Each turn is a prompt of its own to the plan, which counts its share of the whole conversation.
    with kvsieve.attach(model, PLANS[1]) as sieve:
        cache = sieve.prefill(encoded.prompt)
        so_far = torch.cat([encoded.prompt, encoded.followups[0]], 1)
        out = sieve.generate(so_far, torch.ones_like(so_far), cache=cache, max_new_tokens=8, do_sample=False)
    assert visible[1].answers[1] == evaluator.prompter.answer(out.sequences[0, so_far.shape[1] :].tolist())[0]


def test_independent_questions_do_not_see_each_other(evaluator):
    turns = (turn(5, 6), turn(8, 9), turn(10, 11))
    together = evaluator.run(Sample(CONTEXT, turns, independent=True), PLANS, "hidden")
    for number, one in enumerate(turns):
        alone = evaluator.run(Sample(CONTEXT, (one,)), PLANS, "hidden")
        assert [each.answers[number] for each in together] == [each.answers[0] for each in alone]


def test_independent_questions_are_not_asked_visibly(evaluator):
    with pytest.raises(InputError, match="hidden only"):
        evaluator.run(Sample(CONTEXT, (turn(5), turn(6)), independent=True), PLANS, "visible")


def test_decoding_together_changes_nothing(model, evaluator):
    single = Evaluator(model, word_tokenizer(), batch=1, chunk=16)
    sample = Sample(CONTEXT, (turn(5, 6, 7), turn(9)))
    for question in ("visible", "hidden"):
        for one, other in zip(evaluator.run(sample, PLANS, question), single.run(sample, PLANS, question), strict=True):
            assert one.answers == other.answers and one.metrics == other.metrics
            assert one.kl == pytest.approx(other.kl, abs=1e-5)
            # The reasons for the first pass's executor depend on how many tokens pass first.
            mine, theirs = (
                dataclasses.replace(each.record, blocks=dataclasses.replace(each.record.blocks, executors={}))
                for each in (one, other)
            )
            assert mine == theirs


def test_what_did_not_run_says_so(evaluator):
    short = Sample("w5 w6 w7", (turn(5),))
    outcome = evaluator.run(short, [PLANS[0], kvsieve.plan("snapkv", budget="50%", window=30)], "visible")[1]
    assert not outcome.applied and "nothing was evicted" in outcome.notes[0]


def test_decode_time_eviction_acts_in_the_answer_and_in_its_distances(model, evaluator):
    """Without eviction while decoding the same method answers otherwise."""
    asked = QuestionAnswer("w5 w6 w7", ("w1",), exact, 36, spread=True)
    plans = [PLANS[0], kvsieve.plan("h2o", budget=24), kvsieve.plan("h2o", budget=24, every=None)]
    sample = Sample(CONTEXT, (asked,))
    prompt = evaluator.prompter.encode(sample).prompt
    _, rolls, stays = evaluator.run(sample, plans, "visible")
    for plan, outcome in zip(plans[1:], (rolls, stays), strict=True):
        assert outcome.answers == [by_itself(model, evaluator, plan, prompt, limit=36)], plan.name
    assert rolls.answers != stays.answers and abs(rolls.kl - stays.kl) > 1e-6
    assert rolls.record.kept == stays.record.kept and rolls.kl_last == stays.kl_last


def test_an_answer_across_several_changes_of_rotary_tables_is_the_same(evaluator, monkeypatch):
    sample, calls = Sample(CONTEXT, (turn(5, 6, 7),)), itertools.count()
    wanted = [each.answers for each in evaluator.run(sample, PLANS[:1] * 3, "visible")]
    monkeypatch.setattr(loop, "crosses", lambda model, cache: next(calls) % 3 == 2)
    assert [each.answers for each in evaluator.run(sample, PLANS[:1] * 3, "visible")] == wanted


def test_distances_are_taken_throughout_a_long_answer():
    assert compared_places(20, True) == compared_places(20, False) == list(range(20))
    assert compared_places(400, False) == list(range(32))
    places = compared_places(400, True)
    assert len(set(places)) == 32 and places == sorted(places) and (places[0], places[-1]) == (0, 399)


@pytest.mark.parametrize("question", ["visible", "hidden"])
@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_distances_over_a_change_of_rotary_tables_are_read_as_generate_reads(family, question):
    """The prompt of 74 tokens is read by the tables of up to 76."""
    more = {"original_max_position_embeddings": 76} if family == "phi3" else {}
    model = build(
        family, dtype=torch.float64, max_position_embeddings=256, rope_parameters=longrope_factors(76), **more
    )
    evaluator = Evaluator(fill(model), word_tokenizer())
    sample = Sample(CONTEXT, (turn(5, 6, 7),))
    prompt = evaluator.prompter.encode(sample).prompt
    assert prompt.shape[1] == 74
    plans = [PLANS[0], PLANS[0], dataclasses.replace(PLANS[1], name="snapkv")]
    seen, found = [], Evaluator._distributions

    def noting(self, state, reference, places):
        seen.append((list(reference), list(places), found(self, state, reference, places)))
        return seen[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "_distributions", noting)
        reference, same, _ = evaluator.run(sample, plans, question)
    assert (same.kl, same.top1, same.answers) == (pytest.approx(0, abs=1e-6), 1.0, reference.answers)
    tokens, places, ours = seen[0] if family == "llama" else max(seen, key=lambda each: len(each[1]))
    options = {"do_sample": False, "max_new_tokens": len(tokens), "return_dict_in_generate": True}
    own = model.generate(prompt, attention_mask=torch.ones_like(prompt), output_logits=True, **options)
    assert own.sequences[0, 74:].tolist() == tokens and places == list(range(8))
    torch.testing.assert_close(ours[0], torch.cat(own.logits).float().log_softmax(-1), rtol=0, atol=1e-5)


def test_drafts_change_no_answer_and_are_counted(model, evaluator):
    sample = Sample(CONTEXT, (turn(5), turn(6)))
    drafting = Evaluator(model, word_tokenizer(), draft="lookup:tokens=3:ngram=1:adapt=false")
    for question in ("visible", "hidden"):
        plain, drafted = (one.run(sample, PLANS[:4], question) for one in (evaluator, drafting))
        assert [outcome.answers for outcome in drafted] == [outcome.answers for outcome in plain]
        assert [outcome.drafts for outcome in plain] == [None] * 4
        assert all(outcome.drafts.drafted > 0 for outcome in drafted)


@pytest.mark.parametrize("view", ["quest:budget=16", "snapkv:budget=12:window=4:floor=0"])
def test_views_draft_for_every_plan(model, evaluator, monkeypatch, view):
    """Their answers are otherwise decoded together."""
    monkeypatch.setattr(draft_passes, "LEAST", 0.0)
    monkeypatch.setattr(length, "_MARGIN", 0.0)
    sample = Sample(CONTEXT, (turn(5), turn(6)))
    drafting = Evaluator(model, word_tokenizer(), draft=f"self:{view}")
    for question in ("visible", "hidden"):
        plain, drafted = (one.run(sample, PLANS[:4], question) for one in (evaluator, drafting))
        assert [outcome.answers for outcome in drafted] == [outcome.answers for outcome in plain]
        assert all(outcome.drafts.drafted > 0 for outcome in drafted)


def test_a_draft_that_cannot_serve_a_plan_is_refused_before_anything_is_read(model, monkeypatch):
    monkeypatch.setattr(AttachedModel, "feed", lambda *given, **more: pytest.fail("a prompt was read"))
    drafting = Evaluator(model, word_tokenizer(), draft="self:snapkv:budget=12:window=4")
    with pytest.raises(UnsupportedOptionError, match="heads keep different numbers"):
        drafting.run(Sample(CONTEXT, (turn(5),)), [PLANS[0], kvsieve.plan("adakv", budget="30%", window=4)], "visible")


def test_a_draft_may_have_another_tokenizer(model, evaluator, monkeypatch):
    """It is told the model's own."""
    monkeypatch.setattr(draft_passes, "LEAST", 0.0)
    monkeypatch.setattr(length, "_MARGIN", 0.0)
    monkeypatch.setattr(opened, "pass_cost", lambda *_: (0.0, 0.01))
    small = build("llama", seed=1, vocab_size=90)
    words = {word: index for index, word in enumerate(reversed(WORDS[40:]))}
    other = Tokenizer(models.WordLevel(words, unk_token=WORDS[41]))
    other.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    draft = small, PreTrainedTokenizerFast(tokenizer_object=other, unk_token=WORDS[41])
    drafting = Evaluator(model, word_tokenizer(), draft=draft)
    plain, drafted = (one.run(Sample(CONTEXT, (turn(5),)), PLANS[:1], "visible") for one in (evaluator, drafting))
    assert drafted[0].answers == plain[0].answers and drafted[0].drafts.drafted > 0
