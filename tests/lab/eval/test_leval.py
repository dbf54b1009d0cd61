"""L-Eval's rows as samples, from stand-ins of its published format: prompts, order, truncation, bad files."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest

from kvsieve.errors import InputError
from kvsieve.lab.eval.comparison import compared
from kvsieve.lab.eval.merge import subjects
from kvsieve.lab.eval.report import html_report, markdown_report
from kvsieve.lab.eval.results import load
from kvsieve.lab.tasks import document_task, metrics
from kvsieve.lab.tasks.leval import leval
from kvsieve.lab.tasks.public import public_task, public_tasks

CHOICE = "Who?\n (A) Ann\n (B) Bob"


def row(
    text="A story about Ann and Bob.", questions=("Who?\n (A) Ann\n (B) Bob",), answers=("(B) Bob",), metric="exam"
):
    return {
        "instructions": list(questions),
        "outputs": list(answers),
        "input": text,
        "source": "x",
        "evaluation": metric,
    }


def write(folder, name, rows):
    file = folder / name
    data = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows).encode()
    file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return file


def words(sample):
    """Stands for the tokenizer: one token per word of the prompt."""
    return len(f"{sample.context} {sample.turns[0].question}".split())


@pytest.mark.parametrize("name", ["quality.jsonl", "quality.jsonl.gz"])
def test_choice(tmp_path, name):
    (tmp_path / "Closed-ended-tasks").mkdir()
    write(tmp_path / "Closed-ended-tasks", name, [row()])
    task = leval("leval_quality", tmp_path)
    sample = task.sample(0, 1000, 0, words)
    turn = sample.turns[0]
    assert task.name == "leval_quality" and task.modes == ("visible", "hidden") and len(task) == 1
    assert sample.context.endswith("\n\nA story about Ann and Bob.") and "multiple-choice" in sample.context
    assert turn.question.startswith("Who?\n (A) Ann\n (B) Bob\n") and "letter" in turn.question
    assert turn.answers == ("B",) and turn.reply == "(B) Bob"
    assert [turn.score(each, turn.answers)["score"] for each in ("(B) Bob", "B", "(A) Ann")] == [1, 1, 0]
    assert dict(sample.meta) == {"document": 0, "question": 0, "line": 1, "cut": 0}


def test_words_of_the_answer_are_told_where_the_metric_counts_words(tmp_path):
    rows = [row("Page.", ["when", "who"], ["12 May 2001", "Ann"], "f1"), row("Page.", ["why"], ["x"], "LLM")]
    task = leval("leval_natural_question", write(tmp_path, "natural_question.jsonl", rows))
    first, second = (task.sample(i, 100, 0, words).turns[0] for i in range(2))
    assert len(task) == 2  # what a model judges has no metric
    assert first.question == "when\nAnswer with 3 words." and first.max_new_tokens == 25
    assert second.question == "who\nAnswer with 1 word." and second.score is metrics.english_f1
    summary = leval("leval_gov_report_summ", write(tmp_path, "s.jsonl", [row("R.", ["sum"], ["a " * 300], "rouge")]))
    assert summary.sample(0, 900, 0, words).turns[0].max_new_tokens == 512


def test_samples_go_round_the_documents_and_stay_what_they_are(tmp_path):
    names = "abc"
    rows = [row(f"Talk {name}.", [f"{name}{i}" for i in range(3)], [f"t{i}" for i in range(3)]) for name in names]
    rows.append(row("Talk a.", ["a3"], ["t3"]))  # the text of the first: the same document
    task = leval("leval_topic_retrieval_longchat", write(tmp_path, "t.jsonl", rows))
    asked = [task.sample(i, 100, 0, words) for i in range(len(task))]
    assert [task.document(i) for i in range(10)] == [0, 1, 2] * 3 + [0]
    assert [each.turns[0].question for each in asked] == ["a0", "b1", "c2", "a1", "b2", "c0", "a2", "b0", "c1", "a3"]
    assert {(task.document(i), each.context) for i, each in enumerate(asked)} == {
        (number, asked[number].context) for number in range(3)
    }
    assert asked[-1].meta["line"] == 4
    with pytest.raises(InputError, match="has 10 questions, got index 10"):
        task.sample(10, 100, 0, words)


@pytest.mark.parametrize(("name", "kept"), [("leval_quality", "beginning"), ("leval_codeU", "end")])
def test_long_documents_are_cut_once_for_all_questions(tmp_path, name, kept):
    text = " ".join(f"w{i:03}" for i in range(500))
    questions, answers = ["Who? " * 3, "Who? " * 40], ["(A) x", "(B) y"]
    task = leval(name, write(tmp_path, "x.jsonl", [row(text, questions, answers), row("Short.", questions, answers)]))
    long, short = ([task.sample(i, 200, 0, words) for i in range(4) if task.document(i) == n] for n in range(2))
    assert len({each.context for each in long}) == 1 and max(map(words, long)) == 200
    assert (long[0].context.endswith("w499")) == (kept == "end")
    whole = words(task.sample(2, 10_000, 0, words))
    assert long[1].meta["cut"] == whole - 200 and short[0].meta["cut"] == 0 and "Short." in short[0].context
    with pytest.raises(InputError, match="line 1 of .* at least .* raise it"):
        task.sample(0, 30, 0, words)


def test_rules_of_truncation():
    assert document_task.keep_beginning("abcdef", 3) == "abc"
    assert document_task.keep_end("abcdef", 3) == "def" and document_task.keep_end("abc", 0) == ""
    assert document_task.keep_ends("abcdef", 3) == "abf" and document_task.keep_ends("abcdef", 1) == "a"


@pytest.mark.parametrize(
    ("rows", "words_of_it"),
    [
        ([row(), "{broken"], "line 2: not JSON"),
        ([row(), "[1]"], "line 2: expected an object"),
        ([{"context": "c", "input": "q", "answers": [], "all_classes": None}], "this is a row of LongBench"),
        ([{k: v for k, v in row().items() if k != "outputs"}], "line 1: 'outputs' is missing"),
        ([row(), "", {**row(), "outputs": "B"}], "line 3: 'outputs' is 'B', expected a list"),
        ([{**row(), "outputs": ["(A)", "(B)"]}], "'instructions' has 1 entries and 'outputs' 2"),
        ([{**row(), "instructions": [3]}], "'instructions' must be a list of texts"),
        ([{**row(), "outputs": ["Bob"]}], "'outputs' has 'Bob', which begins with no letter"),
        ([row(metric="LLM")], "no row of this file has a metric"),
        ([], "has no rows; expected rows of L-Eval, with input, instructions, outputs, evaluation"),
    ],
)
def test_bad_rows_are_named_before_anything_runs(tmp_path, rows, words_of_it):
    with pytest.raises(InputError) as error:
        leval("leval_quality", write(tmp_path, "quality.jsonl", rows))
    assert words_of_it in str(error.value) and "quality.jsonl" in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="no rows of leval_tpo in .*looked for tpo.jsonl or tpo.jsonl.gz"):
        leval("leval_tpo", tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        leval("leval_tpo", tmp_path / "none")
    (tmp_path / "tpo.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match="cannot read .*tpo.jsonl.gz"):
        leval("leval_tpo", tmp_path)
    for each in "ab":
        (tmp_path / each).mkdir()
        write(tmp_path / each, "quality.jsonl", [row()])
    with pytest.raises(InputError, match="several files could be leval_quality"):
        leval("leval_quality", tmp_path)
    with pytest.raises(InputError, match="leval_quality is read from a file: give its directory as --data"):
        public_task("leval_quality", None)


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"leval_x needs the package rouge_score.*pip install 'kvsieve\[benchmarks\]'"):
        leval("leval_x", write(tmp_path, "x.jsonl", [row(metric="rouge")]))


def test_names_are_listed_once():
    names = [name for name, _ in public_tasks()]
    assert len(set(names)) == len(names) and {"leval_quality", "leval_gsm100", "scbench_kv"} <= set(names)


@pytest.mark.parametrize(
    ("score", "answer", "expected", "value"),
    [
        (metrics.choice_letters, "A, B and D", "ABD", 1.0),
        (metrics.choice_letters, "AB", "ABD", 0.25),
        (metrics.choice_letters, "ABC", "AB", 0.0),
        (metrics.choice_letters, "None", "AB", 0.0),
        (metrics.named, "The Role of Art  in society.\nAnd", "The role of art in society", 1.0),
        (metrics.named, "1\nThe role of art", "the role of art", 1.0),
        (metrics.named, "First line\nThe role of art", "the role of art", 0.0),
        (metrics.named, "", "x", 0.0),
        (metrics.verdict, "That is false, not true.", "False", 1.0),
        (metrics.verdict, "Perhaps", "False", 0.0),
        (metrics.final_number, "3 and 4. The answer is $1,430.00. Next 5", "1430", 1.0),
        (metrics.final_number, "so 3 + 4 = 7\n\nQuestion: 9", "7", 1.0),
        (metrics.final_number, "The answer is seven", "7", 0.0),
        (metrics.says_last, "the final output will be [1, 2]", "[1,2]", 1.0),
        (metrics.says_last, "[1, 2] and then a lot of other words", "[1, 2]", 0.0),
    ],
)
def test_scores(score, answer, expected, value):
    assert score(answer, (expected,)) == {"score": value}


def test_rouge_is_the_packages(tmp_path):
    assert metrics.rouge_l("a b c d", ("a x c d", "q")) == pytest.approx(
        {"score": 0.75, "rouge1": 0.75, "rouge2": 1 / 3}
    )


def test_a_run_from_end_to_end(model_dir, tmp_path, cli):
    (tmp_path / "data").mkdir()
    long = row("Ann met Bob. " * 60, [CHOICE, CHOICE.replace("Who", "Which")], ["(B) Bob", "(A) Ann"])
    write(tmp_path / "data", "quality.jsonl.gz", [long, row()])
    grid = ["--tasks", "leval_quality", "--data", tmp_path / "data", "--lengths", "150", "--question", "both"]
    grid += ["--methods", "knorm", "--budgets", "50%", "--cost-samples", "0", "--dtype", "float32"]
    code, out, err = cli("eval", model_dir, *grid, "--samples", "3", "--out", tmp_path / "o")
    assert code == 0, err
    told = "leval_quality: 1 of 2 documents were cut to 150 tokens"
    assert told in out
    results = load(tmp_path / "o")
    asked = {(each["sample"], each["question"], each["label"]) for each in results.samples}
    assert asked == set(itertools.product(range(3), ("visible", "hidden"), ("full", "knorm")))
    by_sample = {each["sample"]: each for each in results.samples}
    assert [by_sample[i]["meta"]["document"] for i in range(3)] == [0, 1, 0]
    assert by_sample[0]["meta"]["cut"] == by_sample[2]["meta"]["cut"] > 0 == by_sample[1]["meta"]["cut"]
    assert all(each["prompt_tokens"] <= 150 for each in results.samples)
    expected = {each["sample"]: each["expected"] for each in results.samples}
    assert expected[0] == expected[1] != expected[2], "B, B and A, each as a digest"
    assert all(len(answer) == 16 for turns in expected.values() for turn in turns for answer in turn)
    (entry,) = compared(subjects([results]))
    assert told in markdown_report(entry) and f"{told}." in html_report(entry, [])
    write(tmp_path / "data", "quality.jsonl.gz", [row()])
    code, _, err = cli("eval", model_dir, *grid, "--samples", "3", "--out", tmp_path / "o", "--resume")
    assert code == 2 and "results of leval_quality on another text (" in err
