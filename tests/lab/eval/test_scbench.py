"""SCBench's rows as samples, from a local stand-in of its schema, and its scores by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import datasets
import pytest

from kvsieve.errors import InputError
from kvsieve.lab.tasks import metrics, scbench
from kvsieve.lab.tasks.scbench import SUBSETS, SCBench

KV = {
    "id": 7,
    "context": '{"k1": "v1", "k2": "v2"}',
    "multi_turns": [{"input": "Key: k1", "answer": "v1"}, {"input": "Key: k2", "answer": "v2"}],
}
ROWS = {
    "scbench_kv": [KV, {**KV, "id": 8}],
    "scbench_choice_eng": [
        {
            "id": 0,
            "context": "A book.",
            "multi_turns": [
                {"input": "Who?", "answer": "Bob", "options": ["Ann", "Bob", "Cid", "Dan"]},
                {"input": "Where?", "answer": "A", "options": ["Rome", "Oslo", "Bern", "Kyiv"]},
            ],
        }
    ],
    "scbench_vt": [{"id": 0, "context": "VAR X = 1", "multi_turns": [{"input": "Which?", "answer": ["XA", "XB"]}]}],
    "scbench_mf": [{"id": 0, "context": [3, 9, 4], "multi_turns": [{"input": "The largest number?", "answer": 9}]}],
    "scbench_repoqa_and_kv": [
        {
            "id": 0,
            "context": "code",
            "multi_turns": [
                {"input": "adds", "answer": "def add(a, b): return a + b", "task": "scbench_repoqa"},
                {"input": "Key: k1", "answer": "v1", "task": "scbench_kv"},
                {"input": "halves", "answer": "def half(a): return a / 2", "task": "scbench_repoqa"},
            ],
        }
    ],
}


@pytest.fixture
def folder(tmp_path):
    for subset, rows in ROWS.items():
        (tmp_path / f"{subset}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return tmp_path


def words(sample):
    """Stands for the tokenizer: one token per word of the first prompt."""
    return len(f"{sample.context} {sample.turns[0].question}".split())


def test_a_row_becomes_a_conversation(folder):
    task = SCBench("scbench_kv", folder)
    sample = task.sample(1, 1000, 0, words)
    assert task.name == "scbench_kv" and len(task) == 2 and "key-value" in task.title
    assert sample.context.endswith('{"k1": "v1", "k2": "v2"}') and "JSON" in sample.context
    assert [turn.question for turn in sample.turns] == ["Key: k1", "Key: k2"]
    assert [turn.reply for turn in sample.turns] == ["v1", "v2"] and not sample.independent
    assert sample.meta == {"document": 1, "id": 8, "mode": "multi-turn", "cut": 0}
    assert task.sample(1, 1000, 5, words) == sample
    shared = SCBench("scbench_kv", folder / "scbench_kv.jsonl", mode="shared").sample(0, 1000, 0, words)
    assert shared.independent and shared.meta["mode"] == "shared"


def test_each_subset_asks_and_scores_its_own_way(folder):
    choice = SCBench("scbench_choice_eng", folder).sample(0, 1000, 0, words).turns
    assert [turn.answers for turn in choice] == [("B",), ("A",)]
    assert "A. Rome\nB. Oslo\nC. Bern\nD. Kyiv" in choice[1].question
    vt = SCBench("scbench_vt", folder).sample(0, 1000, 0, words).turns[0]
    assert vt.score("it is xa only", vt.answers) == {"score": 0.5} and vt.reply == "XA, XB"
    numbers = SCBench("scbench_mf", folder).sample(0, 1000, 0, words)
    assert numbers.context.endswith("[3, 9, 4]") and numbers.turns[0].answers == ("9",)
    first, second, third = SCBench("scbench_repoqa_and_kv", folder).sample(0, 1000, 0, words).turns
    assert first.answers == ("def add(a, b): return a + b", "def half(a): return a / 2")
    assert third.answers == first.answers[::-1] and third.reply == "def half(a): return a / 2"
    assert (first.max_new_tokens, second.max_new_tokens) == (1024, 80)
    assert second.score("the value is v1", second.answers) == {"score": 1.0}
    for subset in SUBSETS:
        assert scbench._KINDS[subset].title


def test_a_prompt_that_is_too_long_loses_its_middle_openly(tmp_path):
    text = " ".join(f"w{i}" for i in range(500))
    row = {"id": 0, "context": text, "multi_turns": [{"input": "What?", "answer": "w3"}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    task = SCBench("scbench_summary", file)
    whole = task.sample(0, 501, 0, words)
    assert whole.context == text and whole.meta["cut"] == 0
    cut = task.sample(0, 300, 0, words)
    assert 295 <= words(cut) <= 300 and cut.meta["cut"] == 501 - words(cut)
    assert cut.context.startswith("w0 w1 ") and cut.context.endswith(" w498 w499") and "w250" not in cut.context
    with pytest.raises(InputError, match="rows.jsonl, line 1 needs prompts of at least 1 tokens"):
        task.sample(0, 0, 0, words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, "scbench_kv.jsonl, line 1 has no 'context'"),
        ({"multi_turns": None}, "scbench_kv.jsonl, line 1: 'multi_turns' is None, expected a list"),
        ({"multi_turns": []}, "has no 'multi_turns'"),
        ({"multi_turns": [{"input": "k"}]}, "turn 0 of .*scbench_kv.jsonl, line 1 has no answer"),
        ({"multi_turns": [{"input": "k", "answer": []}]}, "has no answer"),
        ({"multi_turns": ["k"]}, "has no input and no answer"),
    ],
)
def test_rows_of_another_schema_are_named(tmp_path, change, message):
    (tmp_path / "scbench_kv.jsonl").write_text(json.dumps({**KV, **change}))
    with pytest.raises(InputError, match=message):
        SCBench("scbench_kv", tmp_path)


def test_wrong_answers_and_tasks_are_named(tmp_path):
    turn = {"input": "?", "answer": "Eve", "options": ["Ann", "Bob", "Cid", "Dan"]}
    row = {"id": 0, "context": "c", "multi_turns": [turn]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(InputError, match="'Eve'.*neither a letter nor one of the options"):
        SCBench("scbench_choice_eng", tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="must name its task, one of scbench_repoqa, scbench_kv; got None"):
        SCBench("scbench_repoqa_and_kv", tmp_path / "rows.jsonl")


def test_bad_arguments_and_missing_files(folder):
    with pytest.raises(InputError, match="did you mean 'scbench_kv'"):
        SCBench("scbench_kw", folder)
    with pytest.raises(InputError, match="'multi-turn' or 'shared', got 'scdq'"):
        SCBench("scbench_kv", folder, mode="scdq")
    with pytest.raises(InputError, match="has 2 rows, got index 2"):
        SCBench("scbench_kv", folder).sample(2, 1000, 0, words)
    with pytest.raises(InputError, match=r"no rows of scbench_qa_eng in .*scbench_qa_eng\.jsonl"):
        SCBench("scbench_qa_eng", folder)
    with pytest.raises(InputError, match="nothing does not exist"):
        SCBench("scbench_kv", folder / "nothing")
    (folder / "bad.jsonl").write_text(json.dumps(KV) + "\n{broken\n")
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2: not JSON"):
        SCBench("scbench_kv", folder / "bad.jsonl")
    (folder / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="has no rows"):
        SCBench("scbench_kv", folder / "empty.jsonl")


def test_rows_from_the_hub(monkeypatch, folder):
    asked = []

    def load(*args):
        asked.append(args)
        # The real library on the stand-in, so that its types of rows are seen.
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS[args[1]])})

    monkeypatch.setattr(datasets, "load_dataset", load)
    for subset in ("scbench_kv", "scbench_choice_eng", "scbench_vt", "scbench_mf"):
        here, there = SCBench(subset, folder), SCBench(subset)
        assert len(here) == len(there) and here.sample(0, 1000, 0, words) == there.sample(0, 1000, 0, words)
    assert asked[0] == ("microsoft/SCBench", "scbench_kv")


def test_a_hub_out_of_reach(monkeypatch):
    def fail(*args):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=r"scbench_kv of microsoft/SCBench.*no route to host; pass a local copy.*PATH"):
        SCBench("scbench_kv")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'kvsieve\[scbench\]'"):
        SCBench("scbench_kv")


def test_nothing_heavy_is_imported():
    program = "import sys, kvsieve, kvsieve.lab.tasks.scbench; assert not {'datasets', 'lm_eval'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# Scores


@pytest.mark.parametrize(
    ("score", "answer", "expected", "points"),
    [
        (metrics.contains, 'It is "ab-1".', ("ab-1",), 1.0),
        (metrics.contains, "It is AB-1.", ("ab-1",), 0.0),
        (metrics.first_number, "The answer is 42, not 7.", ("42",), 1.0),
        (metrics.first_number, "7 or 42", ("42",), 0.0),
        (metrics.first_number, "12.5", ("12.50",), 1.0),
        (metrics.first_number, "none", ("42",), 0.0),
        (metrics.choice_letter, "B", ("B",), 1.0),
        (metrics.choice_letter, "B. Oslo", ("B",), 1.0),
        (metrics.choice_letter, "A B C D", ("B",), 0.0),
        (metrics.choice_letter, "A good question. The correct answer is: (C)", ("C",), 1.0),
        (metrics.choice_letter, "Option D, because A is wrong", ("D",), 1.0),
        (metrics.choice_letter, "Bob did", ("B",), 0.0),
        (metrics.choice_letter, "A", ("A",), 1.0),
        (metrics.choice_letter, "", ("A",), 0.0),
        (metrics.label_match, "(B) because of (A)", ("(B)",), 1.0),
        (metrics.label_match, "(A) or (B)", ("(B)",), 0.0),
        (metrics.label_match, " Yes, of course", ("yes",), 1.0),
        (metrics.label_match, "not yes", ("Yes",), 0.0),
        (metrics.label_match, "Yesterday", ("Yes",), 0.0),
        (metrics.english_f1, "The cat, sat!", ("cat sat",), 1.0),
        (metrics.english_f1, "a cat ran", ("dog", "cat sat"), 0.5),
        (metrics.english_f1, "", ("cat",), 0.0),
        (metrics.chinese_f1, "北京。", ("北京",), 1.0),
        (metrics.chinese_f1, "南京", ("北京",), 0.5),
        (metrics.rouge_l, "a b c d", ("a x c d",), 0.75),
        (metrics.rouge_l, "d c b a", ("a b c d",), 0.25),
        (metrics.rouge_l, "Same words.", ("same WORDS",), 1.0),
        (metrics.rouge_l, "", ("a",), 0.0),
        (
            metrics.same_function,
            "Here:\n```python\ndef f(x):\n    return x\n```\nDone",
            ("def f(x): return x",),
            1.0,
        ),
        (metrics.same_function, "def f(x): return x", ("def g(y): yield 1", "def f(x): return x"), 0.0),
        (metrics.same_function, "I do not know", ("def f(x): return x",), 0.0),
        (metrics.same_function, "```\na b c d e f g h i X\n", ("a b c d e f g h i j",), 1.0),
    ],
)
def test_scores(score, answer, expected, points):
    assert score(answer, expected)["score"] == pytest.approx(points)


def test_english_questions_also_count_the_looser_match():
    assert metrics.english_f1("It was Bob Smith who did it", ("bob smith",)) == {
        "score": pytest.approx(4 / 9),
        "contains": 1.0,
    }
