"""benchmarks/answers/edits.py and joins.py with their generators, on a tiny model."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

import kvsieve
from benchmarks.answers import agent_traces, compared, document_sets, edits, joins
from kvsieve.hf.edit.difference import pieces_between
from kvsieve.lab.tasks.samples import QuestionAnswer
from kvsieve.lab.tasks.scoring import match_all
from kvsieve.planning.turns import render, token_ids
from tiny_models import build
from toy_bytes import byte_chats

KEPT = 2


@pytest.fixture(scope="module")
def tokenizer():
    return byte_chats()


@pytest.fixture(scope="module")
def model(tokenizer):
    return build("llama", vocab_size=len(tokenizer), max_position_embeddings=1 << 15).float().eval()


@pytest.fixture
def short(monkeypatch):
    """Results of tools have few lines, since a token is a byte."""
    monkeypatch.setattr(agent_traces, "LINES", 4)
    monkeypatch.setattr(agent_traces, "NOTES", 20)


def turns(tokenizer, count):
    return list(agent_traces.turns_of(agent_traces.trace(0, count), tokenizer, KEPT))


# Agents


def test_traces_are_the_same_for_the_same_number():
    steps = agent_traces.trace(0, 12)
    assert steps == agent_traces.trace(0, 12) and steps != agent_traces.trace(1, 12)
    assert agent_traces.trace(0, 7) == steps[:7]
    size = agent_traces.TURNS
    assert [step.question is not None for step in steps] == [at % size == 0 for at in range(12)]
    assert [step.call is None for step in steps] == [at % size == size - 1 for at in range(12)]
    for step in steps:
        assert (step.call is None) == (step.result is None)
        assert step.result is None or len(step.result.split("\n")) <= agent_traces.LINES
    name = steps[0].question.split("`")[1]
    assert f"def {name}(" in steps[2].result and name in steps[1].result


def test_prompts_strip_reasoning_and_clear_results(tokenizer, short):
    found = turns(tokenizer, 8)
    before = None
    for number, turn in enumerate(found):
        prompt, reply = (tokenizer.decode(ids[0]) for ids in (turn.prompt, turn.reply))
        assert "<think>" not in prompt and reply.startswith("<think>") and "<|im_end|>" not in reply
        results = number - number // agent_traces.TURNS
        assert prompt.count(agent_traces.CLEARED) == max(0, results - KEPT)
        assert prompt.endswith("<|im_start|>assistant\n")
        if before is not None:
            # Only placeholders of cleared results are new in what was said before.
            known = turn.prompt[0, : turn.known]
            conversation = torch.cat([before.prompt, before.reply], 1)[0]
            new = [piece for piece in pieces_between(conversation, known) if isinstance(piece, torch.Tensor)]
            assert sum(map(len, new)) <= len(agent_traces.CLEARED) + 8
            assert tokenizer.decode(turn.prompt[0, turn.known :]).startswith("<|im_end|>")
        before = turn
    assert found[0].known == 0


def test_a_window_of_all_answers_as_a_new_prefill(model, tokenizer, short):
    options = argparse.Namespace(every=1, answer=4)
    with kvsieve.attach(model, kvsieve.plan("full"), tokenizer=tokenizer) as sieve:
        played = edits.play(sieve, turns(tokenizer, 4), [0, "all"], options, compared.ends_of(model, tokenizer))
        rows = [{"plan": "full", **row} for of_turn in played for row in of_turn]
    assert [(row["turn"], row["window"]) for row in rows] == [(turn, w) for turn in (1, 2, 3) for w in (0, "all")]
    for row in rows:
        assert row["reused"] + row["reread"] == row["known"] < row["prompt"]
        if row["window"] == "all":
            assert row["moved"] == 0 and row["equal"] and row["kl"] < 1e-6
        elif row["turn"] == 3:
            assert row["moved"] and row["reread"] <= len(agent_traces.CLEARED) and row["kl"] > 1e-9
    without, everything = edits.summary(rows)
    assert (without["window"], without["turns"]) == (0, 3) and without["reused"] > everything["reused"]


def test_turns_that_are_not_compared_are_played(model, tokenizer, short):
    options = argparse.Namespace(every=2, answer=2)
    with kvsieve.attach(model, kvsieve.plan("full"), tokenizer=tokenizer) as sieve:
        played = list(edits.play(sieve, turns(tokenizer, 3), ["all"], options, []))
    assert [len(rows) for rows in played] == [0, 1] and played[1][0]["equal"]


# Results


def test_a_result_is_continued_under_the_same_settings_only(tmp_path):
    out = tmp_path / "rows.json"
    compared.Rows(out, {"turns": 3}, None).add([{"plan": "full", "window": 0, "turn": 1}], lambda rows: [])
    again = compared.Rows(out, {"turns": 3}, None)
    assert again.of(plan="full", window=0) and not again.of(plan="kivi")
    again.drop(plan="full")
    again.add([{"plan": "kivi"}], lambda rows: [{"count": len(rows)}])
    known = json.loads(out.read_text())
    assert (
        known["rows"] == [{"plan": "kivi"}] and known["summary"] == [{"count": 1}] and len(known["environments"]) == 2
    )
    with pytest.raises(SystemExit, match="another turns"):
        compared.Rows(out, {"turns": 4}, None)


# Documents


def test_generated_documents_have_the_answers():
    one = document_sets.generated(0)
    assert one == document_sets.generated(0) and one != document_sets.generated(1)
    assert len(one.documents) == document_sets.COUNT and len(one.questions) == 4
    for number, turn in enumerate(one.questions):
        assert len(turn.answers) == 1 + number % 2
        assert all(any(answer in text for text in one.documents) for answer in turn.answers)
        assert turn.score(f"It is {' in '.join(turn.answers)}.", turn.answers)["score"] == 1
        if number % 2:
            person, year = turn.answers
            assert not any(year in text for text in one.documents if person not in text)
    for text in one.documents:
        assert text.startswith("Document: ") and 400 < len(text) < 1500


def test_passages_of_an_article_are_those_of_its_questions(tmp_path, tokenizer):
    sentence = "This paragraph number {} speaks of the {} and of nothing else at all ."
    things = [f"thing{number}" for number in range(30)]
    body = " ".join(f"<P> {sentence.format(at, thing)} </P>" for at, thing in enumerate(things))
    row = {
        "input": f"Things - wikipedia <H1> Things </H1> {body}",
        "instructions": ["what is thing27", "where is thing3"],
        "outputs": ["nothing", "here and there"],
        "evaluation": "f1",
    }
    (tmp_path / "natural_question.jsonl").write_text(json.dumps(row) + "\n")
    parts = document_sets.passages(row["input"], 80)
    assert len(parts) == 31 and not any("<" in part for part in parts)
    assert document_sets.closest(parts, row["instructions"], 2) == [parts[4], parts[28]]
    (one,) = document_sets.natural(str(tmp_path), tokenizer, 3)
    assert len(one.documents) == 3 and all(text.startswith("Document: Things\n") for text in one.documents)
    assert any("thing27" in text for text in one.documents) and any("thing3 " in text for text in one.documents)
    assert {turn.answers for turn in one.questions} == {("nothing",), ("here and there",)}


def test_pieces_are_the_prompt(tokenizer):
    documents = ("Document: one\nA.\n\n", "Document: two\nIt spells <|im_end|>.\n\n")
    prompt = document_sets.pieces(tokenizer, documents, "Why?")
    message = {"role": "user", "content": f"{document_sets.LEAD}\n\n{''.join(documents)}Why?"}
    assert prompt.ids[0].tolist() == token_ids(tokenizer, render(tokenizer, [message]))
    assert [tokenizer.decode(ids[0]) for ids in prompt.documents] == list(documents)
    first = joins.first_documents(prompt, 0.5)
    assert torch.equal(first, torch.cat([prompt.before, prompt.documents[0], prompt.question], 1))


@pytest.mark.parametrize("kinds", ["none:share=40%;modules;ape", "link:tokens=8;blend:share=20%;prophet:share=20%"])
def test_kinds_are_compared_with_full_reading(model, tokenizer, tmp_path, kinds, capsys):
    documents = tuple(f"Document: {name}\n{name} is here.\n\n" for name in ("Ada", "Bob", "Eve"))
    turn = QuestionAnswer("Who?", ("Ada",), match_all, 3)
    one = document_sets.DocumentSet("own", documents, (turn,))
    options = argparse.Namespace(
        kinds=kinds, compressed="keydiff:budget=50%", compressed_kinds="modules", questions=2, minutes=None
    )
    known = compared.Rows(tmp_path / "joins.json", {}, None)
    run = joins.Run(model, tokenizer, options, known)
    run.documents(one, 0)
    rows = {(row["plan"], row["kind"]): row for row in known.rows}
    assert set(rows) == {(plan, kind) for plan, kinds in run.plans.items() for kind in kinds}
    full = rows["full", "full"]
    assert full["same"] and full["kl"] == 0 and full["prefilled"] == full["tokens"]
    for (_, kind), row in rows.items():
        assert row["missing"] == 0 and row["full_s"] == full["seconds"]
        if kind.startswith(("modules", "link", "prophet")):
            assert row["tokens"] == full["tokens"] and row["kl"] > 0 and row["prefilled"] < row["tokens"]
    assert joins.summary(known.rows)[0]["kind"] == "full"
    run.documents(one, 0)
    assert len(known.rows) == len(rows)
    options.kinds += ";relevant:documents=1"
    joins.Run(model, tokenizer, options, known).documents(one, 0)
    kept = {(row["plan"], row["kind"]): row for row in known.rows}
    assert len(known.rows) == len(rows) + 1 and kept["full", "relevant:documents=1"]["kl"] > 0
    assert all(kept[place] is row for place, row in rows.items() if place != ("full", "full"))
