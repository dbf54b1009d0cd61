"""What advise measures, chooses and says; tiny models, since the numbers do not matter here."""

from __future__ import annotations

import json
import random
import shlex
import statistics
from dataclasses import replace

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, PlanError
from kvsieve.lab.advise import AdviceOptions, PlanLimits, advise, built_in, drafting, from_file, material, run
from kvsieve.lab.advise.choose import Candidate, misses, nearest, on_frontier, plan_line, ranked
from kvsieve.lab.advise.intervals import prediction_interval
from kvsieve.lab.advise.measure import Losses, least_memory_at, memory_at
from kvsieve.lab.advise.settings import candidates
from kvsieve.lab.eval.cells import setting
from kvsieve.lab.eval.evaluator import Evaluator
from tiny import tiny_prompt
from tiny_models import build
from toy_words import WORDS, word_tokenizer

SMALL = (("snapkv", {"window": 4, "kernel": 3}), ("streamingllm", {}), ("fastkv", {"tsp_layer": 1, "tsp_rate": 0.5}))


def text(words: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS[3:-1]) + ("." if i % 9 == 8 else "") for i in range(words))


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(build("llama", vocab_size=128), word_tokenizer())


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text(text(2000))
    return file


def refuse():
    raise PlanError("not here")


def made(budget: str, **measured) -> Candidate:
    usual = {"kv_bytes": 100, "loss": 0.01, "top1": 1.0, "score": 1.0, "tpot": 0.01, "tpot_ratio": 1.0}
    return Candidate(setting("knorm", {"budget": budget}), **{**usual, **measured})


def test_the_best_keeps_to_the_limits_and_keeps_long_answers():
    small = made("10%", kv_bytes=10, loss=0.5)
    forgetful = made("20%", kv_bytes=20, loss=0.015, lost={"passkey64": (1, 2)})
    medium = made("30%", kv_bytes=30, loss=0.02)
    large = made("60%", kv_bytes=60, loss=0.001)
    idle = made("90%", kv_bytes=1, loss=0.0, acted=False)
    every = [small, forgetful, medium, large, idle]
    assert ranked(every, PlanLimits()) == [medium, large, forgetful], "0.02 nats unless something is asked for"
    assert ranked(every, PlanLimits(memory=30)) == [medium, small, forgetful]
    assert ranked(every, PlanLimits(memory=30, loss=0.1))[0] == medium
    assert ranked(every, PlanLimits(tpot=0.001)) == []
    assert nearest(every, PlanLimits(memory=5)) == (small, {"memory": 2.0})
    assert misses(medium, PlanLimits(loss=0.01, tpot=0.02)) == {"loss": 2.0} and misses(medium, PlanLimits(), 0.03) == {
        "loss": 1.5
    }
    assert [on_frontier(each, every) for each in every] == [True, True, False, True, False]
    assert plan_line(made("10%").setting) == "kvsieve.plan('knorm', budget='10%')"


@pytest.mark.parametrize(("centres", "spread", "count"), [((-5, -3), 0.9, 3), ((-2,), 2.3, 4), ((-6, -6, -1), 1.5, 2)])
def test_intervals_hold_the_mean_over_other_documents(centres, spread, count):
    """Of skewed losses in some strata, 95% intervals hold the mean of as many others in at least nine of ten sets."""
    rng = random.Random(0)

    def draw():
        return [[min(rng.lognormvariate(centre, spread), 7.0) for _ in range(count)] for centre in centres]

    held, wide = 0, []
    for _ in range(300):
        groups, more, others = draw(), draw(), draw()
        mean, low, high = prediction_interval(groups, [[*a, *b] for a, b in zip(groups, more, strict=True)])
        assert 0 <= low <= mean <= high
        wide.append(high / mean)
        fresh = sum(sum(group) / count for group in others) / len(centres)
        held += low <= fresh <= high
    assert held >= 270
    # They tell something: by what factor losses may be larger depends on how much they differ.
    assert statistics.median(wide) < {0.9: 20, 1.5: 40, 2.3: 100}[spread]


def test_no_loss_is_expected_where_none_was():
    assert prediction_interval([[0.0, 0.0]])[:2] == (0.0, 0.0)


def test_memory_is_what_a_prompt_of_the_context_would_take(evaluator):
    """Computed from entries kept at one length, it is what the cache holds when the other length is run."""
    model = evaluator.model
    for name, given in (("snapkv", {"window": 4}), ("adakv", {"window": 4}), ("full", {})):
        plan = kvsieve.plan(name, **({"budget": "25%"} if given else {}), **given).for_model(model)
        ids = tiny_prompt(1, 240, seed=0, low=3, high=100)
        with kvsieve.attach(model, plan) as sieve:
            held = sieve.generate(ids, torch.ones_like(ids), max_new_tokens=1, do_sample=False).stats.kv_bytes
        told = least_memory_at(evaluator, plan, 240)
        # Room for one token, and lanes.
        assert 0.95 * held - 2200 < told <= held + 4000, name
    half = memory_at(evaluator, plan, 240, {}) // 2
    assert memory_at(evaluator, plan, 120, {}) == half


@pytest.mark.parametrize("context, floor", [(200, [0]), (5120, [])])
def test_a_plan_that_is_recommended_keeps_what_was_measured(evaluator, usual_floor, context, floor):
    """At 200 tokens a plan made by name would keep all of them."""
    options = AdviceOptions(context=context, methods=(("snapkv", {"window": 4}),), budgets=("10%",))
    _, one = candidates(evaluator, options)[0]
    assert [value for name, value in one.given.items() if name == "floor"] == floor
    assert one.plan.floor == 0 and "floor" not in one.label
    assert plan_line(one).count("floor=0") == len(floor)


def test_budgets_follow_from_the_memory(evaluator):
    options = AdviceOptions(
        context=1000,
        limits=PlanLimits(memory=200_000),
        methods=(("snapkv", {}), ("rocketkv", {}), ("rocketkv-mt", {}), ("duoattention", {})),
    )
    found, left_out = candidates(evaluator, options)
    at = {(one.method, one.budget): least_memory_at(evaluator, one.plan, 1000) for one in found[1:]}
    assert {name for name, _ in at} == {"snapkv", "rocketkv"} and all(size <= 200_000 for size in at.values())
    assert max(size for (name, _), size in at.items() if name == "snapkv") > 195_000
    told = "\n".join(left_out)
    assert "rocketkv-mt" in told and "duoattention: duoattention needs a profile" in told and "other methods" in told


def test_what_is_recommended_was_measured_and_its_loss_held_back(evaluator, task):
    seen = []
    options = AdviceOptions(
        context=500,
        limits=PlanLimits(memory=400_000),
        methods=SMALL,
        budgets=("20%", "40%"),
        samples=2,
        measure_at=160,
        cost_samples=1,
    )
    windows = replace(from_file(task), probes=(), per_task=1)
    advice = advise(
        evaluator.model, word_tokenizer(), options, windows, progress=lambda *step: seen.append(step), name="toy"
    )
    assert len(advice.candidates) == 7 and advice.candidates[0].loss == 0 and advice.measured_at == 160
    chosen = advice.choice
    assert chosen is not None and chosen.plan.setting in [each.setting for each in advice.candidates]
    assert chosen.plan.kv_bytes <= 400_000 and chosen.interval[0] <= chosen.loss <= chosen.interval[1]
    fitting = [each for each in advice.candidates if each.kv_bytes <= 400_000 and not each.loses]
    assert chosen.plan.loses or chosen.plan.loss == min(each.loss for each in fitting)
    assert chosen.documents == 2 and all(each.tpot_ratio for each in advice.candidates)
    data = json.loads(json.dumps(advice.to_dict(), default=str))
    assert data["recommended"]["plan"]["plan"].startswith("kvsieve.plan(") and data["env"]["kvsieve"]
    assert data["recommended"]["drafts"]["prompts"] == 2
    assert seen[-1][2] == "done" and seen[-1][0] == seen[-1][1]


def test_drafts_are_measured_in_pairs_on_the_recommended_plan(evaluator, task, monkeypatch):
    """The order within a pair turns, and the prompt is prefilled once for both of it."""
    drawn = from_file(task).drawn(1, 2, 160, 0, evaluator.prompter.count)[:3]
    plan = kvsieve.plan("snapkv", budget="40%", window=4, floor=0).for_model(evaluator.model)
    stats = []
    monkeypatch.setattr(drafting, "ANSWER", 12)
    answer = drafting._answer
    monkeypatch.setattr(drafting, "_answer", lambda *given: stats.append((given[-1], answer(*given))) or stats[-1][1])
    for question in ("visible", "hidden"):
        stats.clear()
        gain = drafting.measure_drafts(evaluator, plan, drawn, question, lambda what: None)
        assert [draft for draft, _ in stats] == ["lookup", None, None, "lookup", "lookup", None]
        assert all((one.drafts is None) == (draft is None) and one.applied for draft, one in stats)
        assert gain.prompts == 3 and gain.tpot_ratio > 0 and gain.tokens_per_pass >= 1
        found = [one.tpot_s for draft, one in stats if draft], [one.tpot_s for draft, one in stats if draft is None]
        assert gain.tpot_ratio == statistics.median(one / other for one, other in zip(*found, strict=True))
    choice = run.RecommendedPlan(made("40%"), 0.0, (0.0, 0.0), 3)
    monkeypatch.setattr(drafting, "_answer", lambda *given: refuse())
    left_out = []
    assert run._with_drafts(evaluator, choice, drawn, "visible", lambda what: None, left_out) is choice
    assert left_out == ["--draft lookup: not here"]


def test_it_tells_at_which_budget_a_lost_answer_survives(evaluator, monkeypatch):
    """Long answers are looked for at larger budgets of the same method, measured ones and others."""
    chosen = made("20%", lost={"passkey64": (2, 3), "ruler_niah_single_3": (0, 3)})
    measured = [made("0.1%"), chosen, made("30%", lost={"passkey64": (1, 3)})]
    asked = []

    def losses(evaluator, drawn, settings, question, step):
        asked.extend(one.budget for one in settings[1:])
        keeps = [Losses(full_score={"passkey64": [1.0]}, score={"passkey64": [score]}) for score in (0, 0.9, 0.995, 1)]
        return keeps

    monkeypatch.setattr(run, "measure_losses", losses)
    assert run._survival(evaluator, chosen, measured, [], "visible") == {"passkey64": "70%"}
    assert asked == ["50%", "70%", "90%"]


def test_parts_and_seeds_have_other_documents(evaluator, tmp_path):
    count = evaluator.prompter.count
    found = built_in()
    drawn = [found.drawn(part, 2, 400, seed, count) for part, seed in ((0, 0), (1, 0), (0, 1))]
    texts = [each.sample.context for part in drawn for each in part]
    assert len(texts) == 30 and len(set(texts)) == 30
    rows = tmp_path / "rows.jsonl"
    lines = [{"context": text(300, i), "question": f"w{i}", "answer": ["w1", "w2"]} for i in range(5)]
    rows.write_text("\n".join(map(json.dumps, lines)))
    parts = [{each.sample.context for each in from_file(rows).drawn(part, 3, 100, 0, count)} for part in (0, 1)]
    assert len(parts[0]) == 3 and len(parts[1]) == 2 and not parts[0] & parts[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"context": "a", "question": "b"}', "line 1: 'answer' is missing"),
        ('{"context": "a", "question": "b", "answer": [""]}', "line 1: 'answer' must be a text"),
        ("{", "line 1: not JSON"),
        (
            '{"context": "a", "question": "b", "answer": "c"}',
            "too few questions to choose a plan by some.* got 1, expected at least 3",
        ),
    ],
)
def test_rows_that_are_none_are_named(evaluator, tmp_path, lines, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(lines)
    with pytest.raises(InputError, match=message):
        from_file(file).drawn(1, 2, 100, 0, evaluator.prompter.count)


def test_the_command_prints_a_plan_or_says_that_there_is_none(cli, model_dir, task, tmp_path, monkeypatch):
    monkeypatch.setattr(material, "TASKS", ("needle",))
    monkeypatch.setattr(material, "PROBES", ("ruler_niah_single_3",))
    usual = ["advise", model_dir, "--task", task, "--samples", 2, "--measure-at", 120, "--context", 400]
    usual += ["--methods", "knorm,streamingllm", "--budgets", "30%"]
    picture = tmp_path / "frontier.png"
    code, out, err = cli(*usual, "--memory", "150KiB", "--cost-samples", 0, "--plot", picture)
    assert code == 0 and "recommended: kvsieve.plan(" in out and "held back" in out and "(95% interval)" in out, err
    assert "nothing was measured at 400 tokens" in out and "not tried:" in out and "takes about" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    (line,) = (line for line in out.splitlines() if line.startswith("    kvsieve run "))
    code, answers, err = cli(*shlex.split(line)[1:], "--max-new-tokens", 2, "--json")
    assert code == 0 and json.loads(answers)["results"][0]["method"] in ("knorm", "streamingllm"), err
    code, out, _ = cli(*usual, "--loss", "1e-9", "--memory", "150KiB", "--cost-samples", 0)
    assert code == 1 and "recommended: none" in out and "The nearest is full" in out and "which misses memory by" in out
    code, _, err = cli(*usual, "--memory", "1KiB", "--cost-samples", 0)
    assert code == 2 and "the nearest, knorm 30%, stores" in err and "times as much" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "2GiX"], "unknown unit 'GiX'"),
        (["--memory", "lots"], "is no size in bytes"),
        (["--tpot", "50"], "--tpot takes a time per token with its unit"),
        (["--loss", "-1"], "--loss must be more than 0"),
        (["--context", "9m"], "beyond the model's context of"),
        (["--context", "100", "--measure-at", "200"], "is more than --context"),
        (["--tpot", "5ms", "--cost-samples", "0"], "needs it measured"),
        (["--task", "nowhere.txt"], "is no file"),
        (["--methods", "snapkw"], "unknown method"),
        (["--samples", "1"], "--samples must be at least 2"),
        *(
            (
                ["--memory", "1KiB", "--methods", methods, "--budgets", "30%", "--context", "400"],
                "times as much; raise --memory",
            )
            # The layers up to the one that selects tokens are too large already.
            for methods in ("knorm", "knorm,fastkv:tsp_layer=1", "fastkv:tsp_layer=1:tsp_rate=0.2")
        ),
    ],
)
def test_bad_input_is_named_before_a_model_is_loaded(cli, model_dir, monkeypatch, options, message):
    monkeypatch.setattr("kvsieve.models.load", lambda *a, **k: pytest.fail("the model was loaded"))
    code, _, err = cli("advise", model_dir, *options)
    assert code == 2 and message in err


def questions(*documents: int) -> str:
    """Rows, one for each number of a document."""
    rows = [{"context": text(120, each), "question": f"w{i}", "answer": "w1"} for i, each in enumerate(documents)]
    return "\n".join(map(json.dumps, rows))


FEW = "and little of other questions"


@pytest.mark.parametrize(
    ("documents", "parts", "caution"),
    [
        ((0, 0, 0), (2, 1), "3 questions about one document: |nothing is known of other documents " + FEW),
        ((0,) * 20, (10, 10), "20 questions about one document: |nothing is known of other documents"),
        ((0, 0, 0, 1), (2, 2), "4 questions about 2 documents: |nothing is known of other documents " + FEW),
        ((0, 1, 2), (2, 1), "3 questions about 3 documents: |little is known of other documents"),
        ((0, 1, 2, 3), (2, 2), ""),
    ],
)
def test_few_questions_are_divided_and_what_they_cannot_show_is_said(evaluator, tmp_path, documents, parts, caution):
    file = tmp_path / "rows.jsonl"
    file.write_text(questions(*documents))
    found = from_file(file)
    drawn = [found.drawn(part, 3, 200, 0, evaluator.prompter.count) for part in (0, 1)]
    assert tuple(map(len, drawn)) == parts
    assert (found.caution or "") == caution.replace("|", "some choose the plan, the others state its loss; ")
    asked = [{each.sample.turns[0].question for each in part} for part in drawn]
    assert not asked[0] & asked[1]
    assert found.longest(10_000, evaluator.prompter.count) < 200 and found.longest(50, evaluator.prompter.count) == 50


def test_one_document_with_three_questions_is_enough(cli, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(material, "PROBES", ("ruler_niah_single_3",))
    file = tmp_path / "rows.jsonl"
    file.write_text(questions(0, 0, 0))
    given = ["--task", file, "--samples", 2, "--context", 300, "--methods", "knorm", "--budgets", "30%"]
    gain = drafting.DraftGain(prompts=1, tokens_per_pass=3.14, tpot_ratio=0.41)
    monkeypatch.setattr(run, "measure_drafts", lambda *given: gain)
    code, out, err = cli("advise", model_dir, *given, "--memory", "150KiB", "--cost-samples", 1)
    assert code == 0 and "recommended: kvsieve.plan(" in out, err
    line = "--draft lookup: worth adding: 3.1 tokens per pass and 0.41 of the time per token in 1 answer"
    assert line in out.splitlines()
    assert "loss on 1 prompt held back" in out
    assert "note: 3 questions about one document: some choose the plan, the others state its loss; nothing is" in out
    # What the document has, and not the context that was asked for.
    assert "nothing was measured at 300 tokens" in out
