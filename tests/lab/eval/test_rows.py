"""Rows of one's own as a task: read, scored, compared from Python and on the command line."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

import kvsieve
from kvsieve.errors import InputError
from kvsieve.lab.eval.comparison import compared
from kvsieve.lab.eval.merge import subjects
from kvsieve.lab.eval.report import markdown_report
from kvsieve.lab.eval.results import load
from kvsieve.lab.tasks.rows import chosen_score, rows_task
from tiny_models import build
from toy_words import WORDS, word_tokenizer

TEXTS = [" ".join(WORDS[3 + (7 * i + 11 * number) % 110] for i in range(60)) for number in range(2)]
ROWS = [
    {"context": TEXTS[0], "question": "w1 w2", "answer": "w5"},
    {"context": TEXTS[1], "question": "w3", "answers": ["w6", "w7"]},
    {"context": TEXTS[0], "question": "w4", "answer": ["w8"], "max_new_tokens": 3},
]


@pytest.fixture(scope="module")
def evaluator():
    return kvsieve.Evaluator(build("llama"), word_tokenizer())


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "my questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_questions_about_one_context_share_a_document(file):
    for task in (rows_task(ROWS), rows_task(file)):
        assert len(task) == 3 and [task.document(index) for index in range(3)] == [0, 1, 0]
        samples = [task.sample(index, 200, 0, lambda sample: 100) for index in range(3)]
        assert [each.turns[0].question for each in samples] == ["w1 w2", "w3", "w4"]
        assert [each.turns[0].answers for each in samples] == [("w5",), ("w6", "w7"), ("w8",)]
        assert [each.turns[0].max_new_tokens for each in samples] == [64, 64, 3]
    assert (task.name, task.title, task.files) == ("own_my_questions_contains", "my questions.jsonl, contains", (file,))
    packed = file.with_name("more.jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert len(rows_task(packed)) == 3 and rows_task(packed, "f1").name == "own_more_f1"


@pytest.mark.parametrize(
    ("score", "answer", "expected", "found"),
    [
        ("contains", "It is Ada Lovelace.", ("ada lovelace",), 1),
        ("contains", "It is Ada.", ("Bo", "Ada"), 1),
        ("contains", "It is Ada.", ("Lovelace",), 0),
        ("exact", "The Pilot House.", ("a pilot house",), 1),
        ("exact", "in the pilot house", ("pilot house",), 0),
        ("f1", "in the pilot house", ("pilot house",), 0.8),
        ("rouge", "one two three four", ("one two four",), 6 / 7),
    ],
)
def test_scores_have_their_values(score, answer, expected, found):
    if score == "rouge":
        pytest.importorskip("rouge_score")
    name, scored = chosen_score(score)
    assert name == score and scored(answer, expected)["score"] == pytest.approx(found)


def test_a_score_of_ones_own_is_a_function_or_its_name(tmp_path, monkeypatch):
    def length(answer, expected):
        return np.float32(len(answer) / 10)

    name, scored = chosen_score(length)
    assert name == "length" and scored("abcde", ()) == {"score": 0.5}
    (tmp_path / "score_of_mine.py").write_text("def same(answer, expected):\n    return answer in expected, 1\n"
                                               "def both(answer, expected):\n    return {'score': True, 'more': 2}\n"
                                               "none = 3\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    name, scored = chosen_score("score_of_mine:both")
    assert name == "both" and scored("a", ()) == {"score": 1.0, "more": 2.0}
    with pytest.raises(InputError, match=r"score score_of_mine:same must return a number from 0 to 1.*got \(True, 1\)"):
        chosen_score("score_of_mine:same")[1]("a", ("a",))
    for wrong in (float("nan"), 1.5, -0.1, {"other": 1}, {"score": 1, "note": "x"}, None):
        with pytest.raises(InputError, match="must return a number from 0 to 1"):
            chosen_score(lambda answer, expected, wrong=wrong: wrong)[1]("a", ("a",))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("exakt", "unknown score 'exakt'; did you mean 'exact'.*package.module:function"),
        ("score_of_nobody:same", "No module named 'score_of_nobody'; expected package.module:function"),
        ("json:nothing", "json has no function 'nothing'"),
        ("json:decoder", "json has no function 'decoder'"),
    ],
)
def test_a_score_that_is_none_is_refused(score, message):
    with pytest.raises(InputError, match=message):
        chosen_score(score)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": "a", "question": "b"}, "line 2: 'answer' is missing"),
        ({"context": "a", "question": "b", "answer": []}, "line 2: 'answer' must be a text or a list of texts"),
        ({"context": "a", "question": "b", "answer": 3}, "line 2: 'answer' must be a text or a list of texts"),
        ({"context": "a", "answer": "b"}, "line 2: 'question' is missing"),
        ({"context": 1, "question": "b", "answer": "c"}, "line 2: 'context' is 1, expected text"),
        ({"context": "a", "question": "b", "answer": "c", "max_new_tokens": 0}, "line 2: 'max_new_tokens' must be"),
    ],
)
def test_rows_that_are_none_are_named_by_their_line(row, message, tmp_path):
    with pytest.raises(InputError, match=f"rows, {message}"):
        rows_task([ROWS[0], row])
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROWS[0])}\n{json.dumps(row)}\n")
    with pytest.raises(InputError, match=f"rows.jsonl, {message}"):
        rows_task(file)


def test_no_rows_and_no_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="given no rows"):
        rows_task([])
    with pytest.raises(InputError, match="cannot read .*nowhere.jsonl"):
        rows_task(tmp_path / "nowhere.jsonl")


def test_compare_returns_a_row_per_sample_and_method(evaluator):
    table = evaluator.compare(ROWS, {"few": "snapkv:budget=20%:window=4", "many": kvsieve.plan("knorm", budget=40)},
                              score=lambda answer, expected: 0.25)  # fmt: skip
    assert [(row["sample"], row["label"]) for row in table] == [
        (index, label) for index in (0, 2, 1) for label in ("full", "few", "many")
    ]
    assert {row["score"] for row in table} == {0.25} and {row["budget"] for row in table} == {None, "20%", "40"}
    few = [row for row in table if row["label"] == "few"]
    assert all(row["kv_entries"] == int(0.2 * row["prompt_tokens"]) for row in few)
    # No document is cut, as long as the longest is.
    assert {row["meta"]["cut"] for row in table} == {0} and len({row["length"] for row in table}) == 1
    short = evaluator.compare(ROWS, "knorm:budget=20", length=40, samples=1, question="hidden")
    assert [row["meta"]["cut"] > 0 for row in short] == [True, True] and short[0]["prompt_tokens"] < 40


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ([3], {}, "methods are names like 'snapkv:budget=20%', plans and role objects, got 3"),
        (["snapkv,knorm"], {}, "a method is written like 'snapkv:budget=20%', got 'snapkv,knorm'"),
        (["knorm:budget=9", "knorm:budget=9"], {}, "two methods are called 'knorm' at a budget of 9; give a dict"),
        (["knorm"], {"question": "both"}, "question must be visible or hidden"),
        (["knorm"], {"length": 10**9}, "outside the model's context"),
    ],
)
def test_what_cannot_be_compared_is_refused(evaluator, methods, options, message):
    with pytest.raises(InputError, match=message):
        evaluator.compare(ROWS, methods, **options)


def test_the_command_scores_every_row_whole_and_says_where_they_are(cli, file, tmp_path, model_dir):
    out = tmp_path / "out"
    usual = ["eval", model_dir, "--task", file, "--methods", "knorm,snapkv:window=4", "--budgets", "20%"]
    usual += ["--cost-samples", 0]
    code, printed, err = cli(*usual, "--out", out, "--score", "f1")
    assert code == 0, err
    results = load(out)
    assert results.tasks == {"own_my_questions_f1": "my questions.jsonl, f1"}
    assert len(results.samples) == 9 and {row["meta"]["cut"] for row in results.samples} == {0}
    assert results.samples[0]["expected"] == [["w5"]] and "contains" in results.samples[0]["metrics"]
    (line,) = [each for each in printed.splitlines() if each.startswith("each sample: ")]
    pandas = pytest.importorskip("pandas")
    table = eval(line.removeprefix("each sample: "), {"pandas": pandas})
    assert list(table.label) == ["full", "knorm", "snapkv window=4"] * 3
    report = markdown_report(*compared(subjects([results])))
    assert "### Settings\n\n| method | paper | window | kernel | pooling |" in report
    code, _, err = cli(*usual, "--out", out, "--score", "f1", "--resume", "--samples", 2)
    assert code == 0, err
    file.write_text(json.dumps(ROWS[0]))
    code, _, err = cli(*usual, "--out", out, "--score", "f1", "--resume")
    assert code == 2 and "own_my_questions_f1 on another text" in err and "--task has" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--score", "f1"], "--score is of the rows of --task"),
        (["--task", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--task", "FILE", "--score", "best"], "unknown score 'best'"),
        (["--task", "FILE", "--server", "http://127.0.0.1:9"], "--task with --server needs --lengths"),
    ],
)
def test_the_command_names_what_is_wrong_before_the_model_is_loaded(cli, file, tmp_path, options, message):
    given = [str(file) if each == "FILE" else each for each in options]
    code, _, err = cli("eval", "no/such", "--out", tmp_path / "out", *given)
    assert code == 2 and message in err and not (tmp_path / "out").exists()
